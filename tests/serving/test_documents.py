"""The `curl` lines of docs/serving.md work, its table of options is right, and the image of the Dockerfile serves."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest
from capabilities import needs, reason
from packaging.requirements import Requirement
from served import EXAMPLES, expected, serving, write_file

from rarebit.serving.settings import ServeSettings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text("utf-8")
BLOCKS = re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines() if "curl " in line]
needs_curl = needs("curl", shutil.which("curl") is not None, "it is not installed")


@needs_curl
def test_the_curl_lines_work(tmp_path):
    assert len(LINES) >= 9
    with serving(write_file(tmp_path / "clicks.onnx")) as server:
        for line in LINES:
            command = line.replace("localhost:8000", server.url).replace(
                "curl ", "curl -sS --fail-with-body "
            )
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", command],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            if "/score" in line and "ndjson" not in line:
                assert json.loads(done.stdout)["model"] == "clicks"


def test_the_first_answer_is_that_of_the_first_line():
    [score] = json.loads(re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0])[
        "scores"
    ]
    assert round(expected("ann", ["a", "b"], 1.5), 4) == score


def test_the_table_of_options_has_every_option_and_its_default():
    table = PAGE.partition("| option | default | meaning |")[2]
    rows = dict(re.findall(r"^\| (`--.*?) \| (.*?) \|", table, re.MULTILINE))
    found = {}
    for names, values in rows.items():
        options = re.findall(r"`--([\w-]+)`", names)
        found |= dict(zip(options, values.split(", "), strict=True))
    defaults = {one.name.replace("_", "-"): one.default for one in fields(ServeSettings)}
    shown = {"": "none", False: "off"}
    assert found == {
        name: shown.get(
            value,
            f"{value:,}"
            if isinstance(value, int) and value > 9000
            else f"{value:g}"
            if isinstance(value, float)
            else str(value),
        )
        for name, value in defaults.items()
    }


def closure(names):
    """Return the files and folders of packages and of all that they need."""
    todo, seen, files = list(names), set(), set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        files |= {
            Path(found.locate_file(one.parts[0]))
            for one in found.files or ()
            if ".." not in one.parts
        }
        needed = map(Requirement, found.requires or ())
        todo += [one.name for one in needed if not one.marker or one.marker.evaluate({"extra": ""})]
    return files


@pytest.mark.slow
def test_the_steps_of_the_dockerfile_make_a_server(tmp_path):
    """The same packages in a fresh environment, and the wheel: it serves without torch."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    if done.returncode and "hatchling" in done.stderr:
        pytest.skip(reason("package index", "hatchling cannot be installed"))
    assert done.returncode == 0, done.stderr
    text = (ROOT / "Dockerfile").read_text("utf-8")
    [line] = re.findall(r"-c /build/constraints.txt (.*?) \\", text)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    [packages] = (tmp_path / "venv").glob("lib/*/site-packages")
    for path in closure(line.split()):
        (packages / path.name).symlink_to(path)
    assert not (packages / "torch").exists()
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    file = write_file(tmp_path / "clicks.onnx")
    command = [tmp_path / "venv" / "bin" / "python", "-m", "rarebit", "serve", file, "--check"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"COLUMNS": "300", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[1])["scores"]) == len(EXAMPLES["user"])
    words = re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", text, re.MULTILINE)
    assert [json.loads(one)[:2] for one in words] == [["rarebit", "serve"], ["/models", "--host"]]
    assert "USER rarebit" in text
