"""Rows as a person writes them, asked of a server over both transports."""

import json

import pytest
from serve.server.linear import LinearCatalog, LinearModel, one_model
from serve.server.serving import serving

from monolith.cli.main import main
from monolith.cluster.security import Guard
from monolith.config import Secret
from monolith.errors import ConfigError, RequestError, UnavailableError, UnknownModelError
from monolith.serve.client import AskedTensor, open_asker, tensors_of

ROWS = [
    {"user": "ann", "item": 7, "price": 0.5, "tags": ["x", "y"], "label": 1},
    {"user": "bo", "item": 8, "tags": [], "price": 1},
]


@pytest.fixture(scope="module")
def server():
    with serving(one_model()) as made:
        yield made


@pytest.fixture(params=["http", "grpc"])
def url(request, server):
    return server.http_url if request.param == "http" else f"grpc://{server.grpc_address}"


def test_rows_become_columns_of_the_types_that_the_model_takes(url):
    with open_asker(url) as asker:
        found = asker.ask(asker.only_model(), ROWS)
    assert found.outputs["score"] == [3 + 7 + 0.5 + 20, 2 + 8 + 1]
    assert (found.model, found.version, found.passed_over) == ("f", "1", ("label",))
    assert found.parameters["step"] == 100


def test_a_value_that_is_null_or_not_there_is_an_empty_cell(url):
    rows = [{"user": "ann", "tags": "x"}, {"user": "bo", "tags": None}, {"user": "cy"}]
    with open_asker(url) as asker:
        assert asker.ask("f", rows).outputs["score"] == [3 + 10, 2, 2]


def test_what_is_wrong_is_said(url):
    with open_asker(url) as asker:
        with pytest.raises(RequestError, match="row 0: 'item' must be INT64, got \"x\""):
            asker.ask("f", [{"item": "x"}])
        with pytest.raises(RequestError, match="takes user, item, price, tags; the rows have x"):
            asker.ask("f", [{"x": 1}])
        with pytest.raises(RequestError, match="row 0: bad"):
            asker.ask("f", [{"user": "bad"}])
        with pytest.raises(UnknownModelError, match="no model 'g'"):
            asker.ask("g", [{"user": "a"}])
        with pytest.raises(UnknownModelError, match="no version '9'"):
            asker.ask("f", [{"user": "a"}], version="9")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "grpc://127.0.0.1:1"])
def test_a_server_that_is_not_there_is_said_to_be(url):
    with open_asker(url) as asker, pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        asker.only_model()


@pytest.mark.parametrize("url", ["ftp://a", "http://", "http://a:x", "grpc://:1"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="cannot ask"):
        open_asker(url)


def test_the_token_is_shown_and_several_models_must_be_told_apart():
    guard = Guard(token=Secret("s3cret"))
    catalog = LinearCatalog({"a": {"1": LinearModel}, "b": {"1": LinearModel}})
    with serving(catalog, server={"guard": guard}) as server:
        for url in (server.http_url, f"grpc://{server.grpc_address}"):
            with open_asker(url, guard) as asker:
                assert asker.ask("b", [{"user": "ann"}]).outputs["score"] == [3]
                with pytest.raises(ConfigError, match="a, b; say which with --model"):
                    asker.only_model()
            with open_asker(url) as asker, pytest.raises(RequestError, match="token"):
                asker.only_model()


def test_lists_of_one_length_where_the_model_says_so():
    made = tensors_of(AskedTensor("x", "FP32", (-1, 2)), [[1, 2], [3, 4.5]])
    assert made == [{"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4.5]}]


def test_the_command_prints_a_table_or_json(url, capsys, tmp_path):
    assert main(["query", url, "--row", json.dumps(ROWS[0]), json.dumps(ROWS[1])]) == 0
    said = capsys.readouterr()
    assert "30.5" in said.out
    assert "f version 1, step 100" in said.out
    assert "does not take label" in said.err
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    for name in ("rows.json", "rows.jsonl"):
        assert main(["query", url, "--file", str(tmp_path / name), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["outputs"]["score"] == [30.5, 11]
        assert answer["version"] == "1"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give rows"),
        (["--row", "{"], "is no JSON"),
        (["--row", "[1]"], "must be a JSON object"),
        (["--file", "nowhere.json"], "cannot read"),
        (["--row", '{"user": {}}'], "must be BYTES"),
    ],
)
def test_the_command_says_what_is_wrong_with_rows(server, capsys, words, says):
    assert main(["query", server.http_url, *words]) == 2
    assert says in capsys.readouterr().err
