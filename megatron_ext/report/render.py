"""The page as one HTML file: no network, no other file, styles and script inline.

Invariants (``tests/report/test_render.py`` asserts each):

1. Text of runs (generated tokens, names, values) is always escaped, and the page's policy lets only its own script run
   and loads nothing.
2. The file appears whole or not at all.
3. The page says nothing of where on a machine its runs lie.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_ext.report.build import Page, build_page
from megatron_ext.report.numbers import counted, number, points, signed
from megatron_ext.report.run_data import ReportError, read_run
from megatron_ext.report.samples import Limits

FILE_NAME = "report.html"
_PAGE = Path(__file__).parent / "page"


def render(page: Page) -> str:
    """The HTML of a page."""
    environment = Environment(
        loader=FileSystemLoader(_PAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {"number": number, "signed": signed, "points": points}
    environment.filters |= {"counted": counted, "visible": visible}
    style, script = ((_PAGE / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    data = [plot.data for section in page.sections for plot in section.plots]
    template = environment.get_template("report.html.j2")
    return template.render(page=page, style=Markup(style), script=Markup(script), policy=policy, data=data)


def visible(text: str) -> str:
    """A token's text with what would not be seen made visible: line breaks, and pieces of a character."""
    return text.replace("\n", "↵\n") if text else "▫"


def write_report(
    runs: Sequence[Path], out: Path | None = None, recipes: Path | None = None, limits: Limits | None = None
) -> Path:
    """Writes the report of one run, or the comparison of several, and returns its path.

    ``out`` defaults to ``report.html`` in the run's folder; several runs need it named. ``recipes`` is the folder of
    presets that configurations are compared with. Raises ``ReportError``, and what reading the folders raises.
    """
    if not runs:
        raise ReportError("a report needs at least one run folder")
    if out is None and len(runs) > 1:
        raise ReportError("a report of several runs needs a place: --out FILE")
    target = runs[0] / FILE_NAME if out is None else out
    html = render(build_page([read_run(path) for path in runs], recipes, limits or Limits()))
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(html, encoding="utf-8", errors="replace")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ReportError(f"{target}: not written: {error.strerror}") from error
    return target
