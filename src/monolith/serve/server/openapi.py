"""The HTTP side of the protocol as an OpenAPI document, and a page that shows it without the internet."""

from __future__ import annotations

from typing import Any

from monolith import __version__
from monolith.serve.server.tensors import DATATYPES

_ERRORS = {
    "400": "The request is malformed, or not what the model takes.",
    "401": "The token is missing or wrong.",
    "403": "The Host or Origin is not of this server, or the caller may not do this.",
    "404": "There is no such model or version.",
    "408": "The request took too long to arrive.",
    "413": "The request is larger than the server allows.",
    "429": "The server is busy; ask again after Retry-After seconds.",
    "500": "The server failed on this request.",
    "503": "The server is stopping or holds too much at the moment, or the model is not loaded.",
    "504": "The caller's time was up.",
}


def openapi_document() -> dict[str, Any]:
    """Return the document."""
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "Monolith: Open Inference Protocol v2",
            "version": __version__,
            "description": "Asks models, and says which there are. The same over gRPC, with reflection.",
        },
        "paths": {
            "/v2": {"get": _get("The server", "ServerMetadata")},
            "/v2/health/live": {"get": _get("Whether the process runs", "Live", ())},
            "/v2/health/ready": {
                "get": _get("Whether every model can answer", "Ready", (), {"503": "Ready"})
            },
            **_model_paths("/v2/models/{name}", ("name",)),
            **_model_paths("/v2/models/{name}/versions/{version}", ("name", "version")),
            "/v2/repository/index": {
                "post": {
                    **_operation(
                        "All models and versions, and their state",
                        "Index",
                        ("400", "401", "403", "413", "429", "503"),
                    ),
                    "requestBody": _body("IndexRequest", False),
                }
            },
            **{
                f"/v2/repository/models/{{name}}/{verb}": {
                    "parameters": [_path_parameter("name")],
                    "post": {
                        **_operation(text, "Empty", ("400", "401", "403", "404", "413", "429", "503")),
                        "requestBody": _body("LoadRequest", False),
                    },
                }
                for verb, text in (("load", "Load what is newest"), ("unload", "Stop serving a model"))
            },
            "/metrics": {
                "get": {
                    "summary": "Metrics for Prometheus",
                    "responses": {
                        "200": {
                            "description": "Metrics.",
                            "content": {"text/plain": {"schema": {"type": "string"}}},
                        },
                        **_errors(("401", "403", "429")),
                    },
                }
            },
        },
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _model_paths(root: str, names: tuple[str, ...]) -> dict[str, Any]:
    parameters = [_path_parameter(name) for name in names]
    timeout = {
        "name": "x-request-timeout-ms",
        "in": "header",
        "required": False,
        "schema": {"type": "integer", "minimum": 1, "maximum": 86400000},
        "description": "How long the caller waits.",
    }
    return {
        root: {
            "parameters": parameters,
            "get": _get("What a model takes and gives", "ModelMetadata", ("401", "403", "404", "429", "503")),
        },
        f"{root}/ready": {
            "parameters": parameters,
            "get": _get(
                "Whether a model can answer",
                "ModelReady",
                ("401", "403", "404", "429"),
                {"503": "ModelReady"},
            ),
        },
        f"{root}/infer": {
            "parameters": parameters,
            "post": {
                **_operation(
                    "Ask a model",
                    "InferResponse",
                    ("400", "401", "403", "404", "408", "413", "429", "500", "503", "504"),
                ),
                "parameters": [timeout],
                "requestBody": _body("InferRequest", True),
            },
        },
    }


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _body(schema: str, required: bool) -> dict[str, Any]:
    return {
        "required": required,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }


def _get(
    summary: str,
    schema: str,
    errors: tuple[str, ...] = ("401", "403", "429"),
    others: dict[str, str] | None = None,
) -> dict[str, Any]:
    return _operation(summary, schema, errors, others)


def _operation(
    summary: str, schema: str, errors: tuple[str, ...], others: dict[str, str] | None = None
) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {
            "200": _response("The answer.", schema),
            **{code: _response(_ERRORS[code], kind) for code, kind in (others or {}).items()},
            **_errors(errors),
        },
    }


def _errors(codes: tuple[str, ...]) -> dict[str, Any]:
    return {code: _response(_ERRORS[code], "Error") for code in codes}


def _response(text: str, schema: str) -> dict[str, Any]:
    return {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    shape: dict[str, Any] = {"type": "object", "properties": properties}
    return {**shape, "required": list(required)} if required else shape


def _schemas() -> dict[str, Any]:
    text = {"type": "string"}
    short = {"type": "string", "maxLength": 1024}
    names = {"type": "array", "items": text}
    shape = {"type": "array", "items": {"type": "integer", "minimum": -1}}
    datatype = {"type": "string", "enum": list(DATATYPES)}
    free = {"type": "object", "additionalProperties": True}
    tensor = _object(("name", "datatype", "shape"), name=text, datatype=datatype, shape=shape)
    return {
        "Empty": _object(),
        "Error": _object(("error",), error=text),
        "Live": _object(("live",), live={"type": "boolean"}),
        "Ready": _object(("ready",), ready={"type": "boolean"}),
        "ModelReady": _object(("name", "ready"), name=text, ready={"type": "boolean"}),
        "ServerMetadata": _object(
            ("name", "version", "extensions"), name=text, version=text, extensions=names
        ),
        "Tensor": tensor,
        "ModelMetadata": _object(
            ("name", "versions", "platform", "inputs", "outputs"),
            name=text,
            versions=names,
            platform=text,
            inputs={"type": "array", "items": tensor},
            outputs={"type": "array", "items": tensor},
        ),
        "IndexRequest": _object(ready={"type": "boolean"}),
        "LoadRequest": _object(parameters=free),
        "Index": {
            "type": "array",
            "items": _object(
                ("name", "version", "state", "reason"),
                name=text,
                version=text,
                state={"type": "string", "enum": ["READY", "LOADING", "UNAVAILABLE"]},
                reason=text,
            ),
        },
        "InferRequest": _object(
            ("inputs",),
            id=short,
            parameters=_object(
                timeout={"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1},
                binary_data_output={"type": "boolean"},
            ),
            inputs={
                "type": "array",
                "items": _object(
                    ("name", "datatype", "shape", "data"),
                    name=short,
                    datatype=datatype,
                    shape={"type": "array", "items": {"type": "integer", "minimum": 0}},
                    parameters=free,
                    data={"type": "array", "items": {}},
                ),
            },
            outputs={
                "type": "array",
                "items": _object(("name",), name=short, parameters=_object(binary_data={"type": "boolean"})),
            },
        ),
        "InferResponse": _object(
            ("model_name", "model_version", "outputs"),
            model_name=text,
            model_version=text,
            id=text,
            parameters=free,
            outputs={
                "type": "array",
                "items": _object(
                    ("name", "datatype", "shape"),
                    name=text,
                    datatype=datatype,
                    shape=shape,
                    parameters=free,
                    data={"type": "array", "items": {}},
                ),
            },
        ),
    }


DOCS_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Monolith: what this server answers</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font-family: ui-monospace, monospace; }
pre { overflow-x: auto; padding: .5rem; border: 1px solid; }
summary { cursor: pointer; padding: .3rem 0; } b { display: inline-block; min-width: 4rem; }
</style></head><body>
<h1>What this server answers</h1>
<p>The Open Inference Protocol, version 2. As a document: <a href="/openapi.json">/openapi.json</a>.</p>
<main id="paths">Reading /openapi.json ...</main>
<script>
fetch("/openapi.json").then(r => r.json()).then(doc => {
  const main = document.getElementById("paths"); main.textContent = "";
  const show = (name, value) => { const p = document.createElement("pre");
    p.textContent = name + "\\n" + JSON.stringify(value, null, 2); return p; };
  for (const [path, item] of Object.entries(doc.paths))
    for (const method of ["get", "post"]) if (item[method]) {
      const box = document.createElement("details"), line = document.createElement("summary");
      const bold = document.createElement("b"), code = document.createElement("code");
      bold.textContent = method.toUpperCase(); code.textContent = path;
      line.append(bold, code, " " + item[method].summary); box.append(line);
      const body = item[method].requestBody;
      if (body) { const name = body.content["application/json"].schema["$ref"].split("/").pop();
        box.append(show("Takes " + name, doc.components.schemas[name])); }
      for (const [code, answer] of Object.entries(item[method].responses)) {
        const text = document.createElement("p");
        text.textContent = code + ": " + answer.description; box.append(text); }
      main.append(box); }
}).catch(error => { document.getElementById("paths").textContent = "Cannot read /openapi.json: " + error; });
</script></body></html>
"""
