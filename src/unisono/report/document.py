"""One HTML page that holds all it needs and can ask nobody for anything.

The page's policy lets a browser run its two scripts, known by their hashes, and load nothing: no
script that got into the text would run, and no request would leave. Whatever a template is given is
escaped, and characters that would be hidden are written out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from importlib import resources
from typing import Any

from unisono.quantities import count, duration
from unisono.report.curves import small
from unisono.report.text import moment, plain, value

MARK = '<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="Unisono">\n'
_MISSING = (
    "To draw a page, plotly and jinja2 must be installed, but are not: install them with "
    "`pip install 'unisono[report]'`."
)


class MissingLibraryError(ValueError):
    """A library that draws is not installed."""


def rendered(template: str, **context: Any) -> str:
    """Return a page.

    Args:
        template: the file beside this one that describes it.
        context: what the template names.

    Raises:
        MissingLibraryError: plotly or jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingLibraryError(_MISSING) from None
    environment = Environment(
        loader=FunctionLoader(_resource),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda shown: shown if isinstance(shown, Markup) else plain(shown),
        trim_blocks=True,
    )
    filters = {"count": count, "duration": duration, "moment": moment, "value": value}
    environment.filters |= filters
    environment.policies["json.dumps_function"] = _as_json
    library, script = get_plotlyjs(), _resource("page.js")
    return MARK + environment.get_template(template).render(
        policy=Markup(_policy(library, script)),
        style=Markup(_resource("page.css")),
        library=Markup(library),
        script=Markup(script),
        made_unix_s=time.time(),
        **context,
    )


def _policy(*scripts: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()) for one in scripts)
    hashes = " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _as_json(found: object, **_: object) -> str:
    return json.dumps(small(found), allow_nan=False, separators=(",", ":"))


def _resource(name: str) -> str:
    return resources.files("unisono.report").joinpath(name).read_text(encoding="utf-8")
