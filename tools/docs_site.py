"""Hooks of MkDocs: the pages that are made from the code, and links that lead out of `docs/`.

    make docs

A page for each method: its section of docs/methods.md, the docstring of its file with the equation, and its settings.
A page of all public names, from their docstrings. A page of the examples. The home page is README.md, and the other pages of
the root are pages too. A link to any other file of the repository leads to a copy of that file in the site.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import json
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import rarebit
from rarebit.technique import technique_class, technique_names

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    **{
        f"{name}.md": f"{name.lower()}.md"
        for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT")
    },
}
COPIES = "files"
"""The folder of the site with copies of files of the repository."""
MODULES = (
    "data",
    "training",
    "tables",
    "transfer",
    "pruning",
    "codes",
    "row_gradients",
    "research",
    "testing",
)
"""What has more names, one level down."""
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(\))")
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
PICTURE = re.compile(r'<picture>.*?alt="([^"]*)".*?</picture>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and copies of the files that pages link to."""
    methods = {f"methods/{name}.md": method_page(name) for name in technique_names()}
    pages = {
        **{uri: (ROOT / path).read_text("utf-8") for path, uri in ROOT_PAGES.items()},
        **methods,
        "api.md": api_page(),
        "examples.md": examples_page(),
    }
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    [section] = [entry["Methods"] for entry in config.nav or [] if "Methods" in entry]
    others: list[dict[str, str]] = []
    for name, uri in zip(technique_names(), methods, strict=True):
        is_ours = not technique_class(name).__module__.startswith("rarebit.research")
        (section if is_ours else others).append({name: uri})
    section.append({"For comparison": others})
    copied: set[str] = set()
    for file in files.documentation_pages():
        for _, path, _, _ in LINK.findall(CODE.sub("", file.content_string)):
            target = source_of(file.src_uri, path)
            if site_page(target) is None and (ROOT / target).is_file() and target not in copied:
                copied.add(target)
                copy = File.generated(config, f"{COPIES}/{target}", abs_src_path=str(ROOT / target))
                files.append(copy)
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Turn links into links of the site, leave out the comments with sources, and show the figure of the theme."""
    uri = page.file.src_uri

    def linked(found: re.Match[str]) -> str:
        start, path, anchor, end = found.groups("")
        target = source_of(uri, path)
        own = site_page(target) or (f"{COPIES}/{target}" if (ROOT / target).is_file() else None)
        if own is None:
            return found[0]  # MkDocs reports it
        if own.startswith("examples.md#"):
            own, anchor = "examples.md", own.removeprefix("examples.md")
        return f"{start}{posixpath.relpath(own, posixpath.dirname(uri) or '.')}{anchor}{end}"

    return outside_code(
        lambda text: spaced(LINK.sub(linked, COMMENT.sub("", PICTURE.sub(_pictures, text)))),
        markdown,
    )


def on_post_page(output: str, **_: Any) -> str:
    """Name the search dialog, make empty heads of tables no heads, and let long settings in tables break after a colon or plus."""
    output = output.replace('role="dialog">', 'role="dialog" aria-label="Search">')
    output = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", output)
    return re.sub(
        r"(?<=<td><code>)[^<\n]+(?=</code></td>)",
        lambda found: re.sub(r"[:+](?=\w)", r"\g<0><wbr>", found[0]),
        output,
    )


def _pictures(found: re.Match[str]) -> str:
    """Return the figure for the theme that is chosen on the site, which may not be that of the browser."""
    return "\n".join(
        f'<picture class="only-{theme}">'
        f'<source media="(max-width: 600px)" srcset="assets/frontier-narrow-{theme}.svg">'
        f'<img src="assets/frontier-{theme}.svg" alt="{found[1]}"></picture>'
        for theme in ("light", "dark")
    )


def outside_code(change: Any, markdown: str) -> str:
    """Return a page with everything but its code changed."""
    parts, end = [], 0
    for code in re.finditer(r"^```.*?^```", markdown, re.MULTILINE | re.DOTALL):
        parts += [change(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])


def spaced(text: str) -> str:
    """Return a text with an empty line before each list, which Python's Markdown needs."""
    lines = text.split("\n")
    new: list[str] = []
    for line in lines:
        is_item = re.match(r"(- |\d+\. )", line)
        if is_item and new and new[-1].strip() and not re.match(r"(- |\d+\. |  )", new[-1]):
            new.append("")
        new.append(re.sub(r"^  (?=\S)", "    ", line) if new else line)
    return "\n".join(new)


def source_of(uri: str, path: str) -> str:
    """Return the file of the repository that a link of a page means."""
    made = {site: source for source, site in ROOT_PAGES.items()}
    folder = posixpath.dirname(made.get(uri, f"docs/{uri}"))
    if uri.startswith("methods/"):
        folder = "docs"  # its text is that of docs/methods.md
    return posixpath.normpath(posixpath.join(folder, path))


def site_page(path: str) -> str | None:
    """Return the page or asset of the site for a file of the repository; None for all others."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path == "examples":
        return "examples.md"
    if path.startswith("examples/") and path.endswith((".py", ".ipynb")):
        return f"examples.md#{Path(path).stem}"
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def method_page(name: str) -> str:
    """Return the page of a method."""
    kind = technique_class(name)
    file = inspect.getsourcefile(kind)
    assert file is not None
    source = Path(file).relative_to(ROOT).as_posix()
    module = inspect.getdoc(inspect.getmodule(kind)) or ""
    return "\n\n".join(
        [
            f"# {name}",
            section_of_method(name),
            "## From its file",
            f"{kind.__name__}, in [{Path(source).name}](../{source}): {kind.paper}. Cost: {kind.cost}.",
            f"```text\n{module}\n```",
            "## Its class",
            described(kind.__name__, kind, level=3),
        ]
    )


def section_of_method(name: str) -> str:
    """Return what docs/methods.md says about a method."""
    page = (ROOT / "docs/methods.md").read_text("utf-8")
    found = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"docs/methods.md has no section for {name}")
    names = "|".join(map(re.escape, technique_names()))
    return re.sub(rf"\]\(#({names})\)", r"](methods/\1.md)", found[1].strip())


def api_page() -> str:
    """Return the page of all public names."""
    parts = [
        "# Python",
        "All public names, after `import rarebit as rb`: first those of `rb` itself, then those one level down, such as `rb.data`.",
    ]
    groups: dict[str, list[str]] = {}
    for name in rarebit.__all__:
        thing = getattr(rarebit, name)
        if callable(thing):
            groups.setdefault(thing.__module__.split(".")[1], []).append(name)
    for group, names in sorted(groups.items()):
        parts.append(f"## rarebit: {group.replace('_', ' ')}")
        parts += [described(f"rb.{name}", getattr(rarebit, name)) for name in names]
    for module in map(importlib.import_module, (f"rarebit.{name}" for name in MODULES)):
        parts += [f"## {module.__name__}", prose(inspect.getdoc(module) or "")]
        short = module.__name__.replace("rarebit.", "rb.")
        parts += [described(f"{short}.{name}", getattr(module, name)) for name in own_names(module)]
    return "\n\n".join(parts)


def own_names(module: ModuleType) -> Iterator[str]:
    """Yield the public classes and functions of a module that are not in `rarebit` itself."""
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and name not in rarebit.__all__:
            yield name


def examples_page() -> str:
    """Return the page of the examples."""
    parts = ["# Examples", "Each runs by itself, in seconds, with data that it makes."]
    for path in sorted((ROOT / "examples").glob("[!_]*.py")):
        text = path.read_text("utf-8")
        title = (ast.get_docstring(ast.parse(text)) or "").split("\n", 1)[0].rstrip(".")
        parts += [
            f"## {title} {{ #{path.stem} }}",
            f"`python examples/{path.name}`",
            f"```python\n{text}```",
        ]
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        first, *cells = json.loads(path.read_text("utf-8"))["cells"]
        title, _, text = "".join(first["source"]).removeprefix("# ").partition("\n")
        parts += [
            f"## Notebook: {title} {{ #{path.stem} }}",
            f"`examples/{path.name}`",
            text.strip(),
        ]
        for cell in cells:
            source = "".join(cell["source"])
            parts.append(
                re.sub("^#", "##", source, flags=re.MULTILINE)
                if cell["cell_type"] == "markdown"
                else f"```python\n{source}\n```"
            )
            parts += [f"```text\n{''.join(out['text'])}```" for out in cell.get("outputs", ())]
    return "\n\n".join(parts)


def described(name: str, thing: Any, level: int = 3) -> str:
    """Return a class or a function in Markdown: signature, docstring, settings, methods."""
    parts = [f"{'#' * level} `{name}`"]
    if inspect.isclass(thing) or inspect.isfunction(thing):
        parts.append(f"```python\n{signature(name, thing)}\n```")
    parts.append(prose(inspect.getdoc(thing) or ""))
    if inspect.isclass(thing):
        parts += [fields(thing), *methods_of(thing)]
    return "\n\n".join(part for part in parts if part)


def signature(name: str, thing: Any) -> str:
    """Return the call of a thing, without its types: the table of its settings has them."""
    try:
        found = inspect.signature(thing)
    except ValueError:  # an error class, or one of C
        return name
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    text = str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    text = re.sub(r"<[^<>]*>", "...", text)
    return (
        f"{name}{text}"
        if len(name + text) <= 90
        else f"{name}(\n    {', '.join(map(_plain, parameters))}\n)"
    )


def _plain(parameter: inspect.Parameter) -> str:
    return re.sub(r"<[^<>]*>", "...", str(parameter))


def fields(kind: type) -> str:
    """Return a table of the settings of a dataclass, with the docstring below each field."""
    if not dataclasses.is_dataclass(kind):
        return ""
    meanings = field_docstrings(kind)
    rows = []
    for field in dataclasses.fields(kind):
        if field.init and field.name in meanings:
            default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
            cells = (f"`{field.name}`", default, prose(meanings[field.name]).replace("\n", " "))
            rows.append("| " + " | ".join(cell.replace("|", "&#124;") for cell in cells) + " |")
    return "\n".join(["| setting | default | |", "|---|---|---|", *rows]) if rows else ""


@functools.cache
def field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class and of those it extends."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("rarebit"):
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for line, after in zip(tree.body, tree.body[1:], strict=False):
            match line, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(text))
                ):
                    found[name] = inspect.cleandoc(text)
    return found


def methods_of(kind: type) -> Iterator[str]:
    """Yield the documented methods of a class."""
    for name, thing in vars(kind).items():
        function = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            call = re.sub(r"\((self|cls)(, )?", "(", signature(name, function), count=1)
            yield f"**`.{call}`**\n\n{prose(inspect.getdoc(function) or '')}"


def prose(text: str) -> str:
    """Return a docstring as Markdown: examples and indented lines as code."""
    new: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.split("\n")
        start = next(
            (n for n, line in enumerate(lines) if line.lstrip().startswith(">>>")), len(lines)
        )
        before, example = lines[:start], lines[start:]
        if before and all(line.startswith("    ") for line in before):
            new.append("```text\n" + textwrap.dedent("\n".join(before)) + "\n```")
        elif before:
            new.append(escaped("\n".join(before)))
        if example:
            new.append("```pycon\n" + textwrap.dedent("\n".join(example)) + "\n```")
    return "\n\n".join(new)


def escaped(text: str) -> str:
    """Return a text whose < is no tag, but for code."""
    return "".join(
        part if part.startswith("`") else part.replace("<", "&lt;")
        for part in re.split(r"(`[^`]*`)", text)
    )
