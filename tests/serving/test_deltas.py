"""A server applies deltas to the model that it serves: no request fails, and no scores mix."""

import contextlib
import itertools
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from served import serving, wait_for, write_file

from rarebit.errors import ServingError
from rarebit.export.delta import read_delta, write_delta
from rarebit.serving.forms import from_rows
from rarebit.serving.repository import find_source, take_snapshot
from rarebit.serving.scorer import load_scorer

ROWS = [{"user": user, "tags": ["a"], "price": price} for user in ("ann", "é") for price in (1, 7)]
LOAD = "/v2/repository/models/clicks/load"
DAYS = ("monday", "tuesday", "wednesday")


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """Return the folder of the files of three days, and of the deltas between them."""
    folder = tmp_path_factory.mktemp("days")
    for bias, day in enumerate(DAYS):
        write_file(folder / f"{day}.onnx", bias=bias / 3)
    for before, day in itertools.pairwise(DAYS):
        write_delta(
            folder / f"{before}.onnx", folder / f"{day}.onnx", folder / f"clicks.{day}.delta"
        )
    return folder


@pytest.fixture
def models(days, tmp_path):
    """Return a folder with the model of Monday."""
    shutil.copy(days / "monday.onnx", tmp_path / "clicks.onnx")
    return tmp_path


def version_of(days, day):
    delta = read_delta(days / f"clicks.{day if day != 'monday' else 'tuesday'}.delta")
    return delta.base_version if day == "monday" else delta.version


def scores_of(days, day):
    scorer = load_scorer(days / f"{day}.onnx", 1)
    return scorer.run(from_rows(ROWS, scorer.inputs).arrays).score.tolist()


def test_deltas_are_applied_under_load_and_no_scores_mix(days, models):
    versions = {version_of(days, day): day for day in DAYS}
    stop, seen = threading.Event(), set()

    def ask(server):
        found = []
        body, kind = json.dumps({"rows": ROWS}).encode(), {"content-type": "application/json"}
        with contextlib.closing(server.connect()) as connection:
            while not stop.is_set():
                connection.request("POST", "/score", body, kind)
                response = connection.getresponse()
                found.append((response.status, json.loads(response.read())))
                seen.add(found[-1][1].get("version"))
        return found

    with serving(models / "clicks.onnx") as server, ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(ask, server) for _ in range(2)]
        try:
            for count, day in enumerate(DAYS[1:], start=2):
                wait_for(lambda count=count: len(seen) == count - 1)
                shutil.copy(days / f"clicks.{day}.delta", models)
                answer = server.ask("POST", LOAD)
                assert answer.status == 200, answer.body
                assert versions[answer.json["version"]] == day
                # every request from now on is answered by the new version
                assert server.score({"rows": ROWS}).json["version"] == answer.json["version"]
                wait_for(lambda count=count: len(seen) == count)
        finally:
            stop.set()
        answers = [one for thread in asked for one in thread.result()]
        [status] = server.status["models"]
        assert status["deltas"] == ["clicks.tuesday.delta", "clicks.wednesday.delta"]
        assert status["version"] == version_of(days, "wednesday")
        metrics = server.ask("GET", "/metrics").body.decode()
        assert f'version="{status["version"]}"' in metrics
        assert server.events("loaded")[-1]["deltas"] == status["deltas"]
    assert {status for status, _ in answers} == {200}
    wanted = {version: scores_of(days, day) for version, day in versions.items()}
    assert {body["version"] for _, body in answers} == set(versions)
    for _, body in answers:
        assert np.float32(body["scores"]).tolist() == wanted[body["version"]]
    order = list(versions)
    for thread in asked:  # each client sees the days in their order
        numbers = [order.index(body["version"]) for _, body in thread.result()]
        assert numbers == sorted(numbers)


def test_deltas_that_do_not_fit_leave_the_old_version(days, models):
    with serving(models) as server:
        old = version_of(days, "monday")

        def refused():
            answer = server.ask("POST", LOAD)
            assert answer.status == 400
            assert answer.error.endswith(f"; version '{old}' is still served")
            assert server.score({"rows": ROWS}).json["version"] == old
            return answer.error

        shutil.copy(days / "clicks.wednesday.delta", models)
        wanted, base = version_of(days, "tuesday"), version_of(days, "monday")
        assert refused().startswith(
            f"cannot apply 'clicks.wednesday.delta': the delta is for version {wanted}; "
            f"'clicks.onnx' is version {base}"
        )
        shutil.copy(days / "clicks.tuesday.delta", models / "clicks.1.delta")
        shutil.copy(days / "clicks.tuesday.delta", models / "clicks.2.delta")
        assert refused().startswith("these deltas do not follow one another: clicks.1.delta, cl")
        (models / "clicks.2.delta").write_bytes(b"nonsense")
        assert "clicks.2.delta' is no delta, or a damaged one" in refused()
        # as while it is being copied
        data = (days / "clicks.tuesday.delta").read_bytes()
        (models / "clicks.1.delta").write_bytes(data[:-1])
        (models / "clicks.2.delta").unlink()
        assert "clicks.1.delta' is no delta, or a damaged one" in refused()
        (models / "clicks.1.delta").write_bytes(data)
        assert server.ask("POST", LOAD).json["version"] == version_of(days, "wednesday")


def snapshot_of(folder, name):
    """Take a snapshot of a model, as a server that starts; return its version and deltas."""
    snapshot = take_snapshot(find_source(folder, name))
    try:
        return snapshot.version, snapshot.deltas
    finally:
        snapshot.folder.remove()


def test_each_model_has_its_own_deltas(days, models):
    shutil.copy(days / "tuesday.onnx", models / "clicks.new.onnx")
    shutil.copy(days / "clicks.tuesday.delta", models / "clicks.tuesday.delta")
    shutil.copy(days / "clicks.wednesday.delta", models / "clicks.new.wednesday.delta")
    shutil.copy(days / "clicks.wednesday.delta", models / "other.delta")
    tuesday, wednesday = (version_of(days, day) for day in DAYS[1:])
    assert snapshot_of(models, "clicks") == (tuesday, ("clicks.tuesday.delta",))
    assert snapshot_of(models, "clicks.new") == (wednesday, ("clicks.new.wednesday.delta",))


def test_a_delta_of_a_numbered_version_changes_the_version(days, tmp_path):
    (tmp_path / "clicks" / "1").mkdir(parents=True)
    shutil.copy(days / "monday.onnx", tmp_path / "clicks" / "1" / "model.onnx")
    assert snapshot_of(tmp_path, "clicks") == ("1", ())
    shutil.copy(days / "clicks.tuesday.delta", tmp_path / "clicks" / "1" / "model.delta")
    assert snapshot_of(tmp_path, "clicks") == (version_of(days, "tuesday"), ("model.delta",))


def test_deltas_in_a_circle_are_refused(days, tmp_path):
    shutil.copy(days / "monday.onnx", tmp_path / "clicks.onnx")
    shutil.copy(days / "clicks.tuesday.delta", tmp_path)
    write_delta(days / "tuesday.onnx", days / "monday.onnx", tmp_path / "clicks.back.delta")
    with pytest.raises(ServingError, match="do not follow one another"):
        snapshot_of(tmp_path, "clicks")
