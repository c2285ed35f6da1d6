"""The page at `/docs`: the OpenAPI document for people, with requests to copy; no script, no network."""

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from recap_ctr.serve.page import hash_source

# These tables hold words, not numbers, and the schema of a parameter may be long.
_TABLES = "th, td { text-align: left; white-space: normal; } td:last-child { overflow-wrap: anywhere; }\n"
_STYLE = (files("recap_ctr.pages") / "style.css").read_text(encoding="utf-8") + _TABLES
POLICY = (
    f"default-src 'none'; style-src {hash_source(_STYLE)}; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_CURL = """curl{token} {address}/score -H 'content-type: application/json' \\
    -d '{body}'"""
_PYTHON = """import polars as pl
from recap_ctr.serve.client import Client

with Client("{address}"{python_token}) as client:
    print(client.score(pl.DataFrame({rows})))"""
_TRITON = """import numpy as np
import tritonclient.http as triton

values = triton.InferInput({name!r}, [1], {datatype!r})
values.set_data_from_numpy(np.array([{value!r}], {numpy}), binary_data=False)
client = triton.InferenceServerClient({host!r})
print(client.infer({model!r}, [values]{triton_token}).as_numpy("probability"))"""


def html(document: dict[str, Any], metadata: dict[str, Any], host: str, scheme: str = "http") -> str:
    """Return the page of an OpenAPI document; `metadata` are those of the model by the Open Inference Protocol."""
    operations = "\n".join(
        _operation(method, path, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    )
    snippets = "\n".join(
        f"<h3>{escape(title)}</h3>\n<pre>{escape(text)}</pre>"
        for title, text in _snippets(document, metadata, host, scheme).items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>RECAP: how to ask</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>How to ask this server</h1>
<p class="lead">{escape(document["info"]["description"])} <a href="/">Try a row</a>, or read the
<a href="/openapi.json">OpenAPI document</a> that this page is made of.</p>
<section><h2>Requests to copy</h2>
{snippets}
</section>
<section><h2>Addresses</h2>
{operations}
</section>
</main>
</body>
</html>"""


def _snippets(document: dict[str, Any], metadata: dict[str, Any], host: str, scheme: str) -> dict[str, str]:
    """Return a request by each kind of client, with a value for the model's first column."""
    first = metadata["inputs"][0]
    is_number = first["datatype"] == "FP64"
    value: Any = 1.0 if is_number else "value"
    has_token = "security" in document
    parts = {
        "address": f"{scheme}://{host}",
        "host": host,
        "body": json.dumps({"rows": [{first["name"]: value}]}).replace("'", "'\\''"),
        "rows": json.dumps([{first["name"]: value}]),
        "token": ' -H "authorization: Bearer $RECAP_TOKEN"' if has_token else "",
        "python_token": ', token=os.environ["RECAP_TOKEN"]' if has_token else "",
        "triton_token": ', headers={"authorization": "Bearer " + token}' if has_token else "",
        "name": first["name"],
        "datatype": first["datatype"],
        "numpy": "np.float64" if is_number else "object",
        "value": value,
        "model": metadata["name"],
    }
    python = ("import os\n\n" if has_token else "") + _PYTHON
    titles = {"curl": _CURL, "Python": python, "Triton's client, by the Open Inference Protocol": _TRITON}
    return {title: text.format(**parts) for title, text in titles.items()}


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    """Return one address: what it does, its parameters, and what it answers."""
    lines = [
        f"<h3><code>{method.upper()} {escape(path)}</code></h3>",
        f"<p>{escape(operation['summary'])}</p>",
    ]
    if "description" in operation:
        lines.append(f"<p>{escape(operation['description'])}</p>")
    if parameters := operation.get("parameters"):
        rows = [
            (entry["name"], entry["in"], entry.get("description", ""), json.dumps(entry["schema"]))
            for entry in parameters
        ]
        lines.append(_table(("parameter", "in", "meaning", "schema"), rows))
    answers = [(code, response["description"]) for code, response in operation["responses"].items()]
    lines.append(_table(("status", "meaning"), answers))
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'
