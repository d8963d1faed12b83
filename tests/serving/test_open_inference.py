"""The Open Inference Protocol: tritonclient against a real server, and requests that it would not send."""

import json
import struct

import numpy as np
import pytest
from capabilities import needs_package
from served import expected, write_file

ROWS = [
    ("ann", "a", 1.5),
    ("", "", None),
    ("15", "b", 2.0),
    ("nobody", "a|b", -2.0),
    ("a\0b", "c", 0.0),
]
SCORES = [expected(*row) for row in ROWS]
UNKNOWN = [[False, False], [False, False], [False, False], [True, True], [False, False]]
PRICES = [np.nan if price is None else price for _, _, price in ROWS]

triton = needs_package("tritonclient")


@pytest.fixture
def client(server):
    http = pytest.importorskip(
        "tritonclient.http", reason="capability: package tritonclient: it is not installed"
    )
    with http.InferenceServerClient(server.url) as client:
        yield client


def inputs_of(client_module, *, binary, prices=PRICES, shape=(len(ROWS),)):
    users, tags, _ = zip(*ROWS, strict=True)
    found = []
    for name, datatype, values in (
        ("user", "BYTES", np.array(users, object)),
        ("tags", "BYTES", np.array(tags, object)),
        ("price", "FP64", np.array(prices)),
    ):
        tensor = client_module.InferInput(name, list(shape), datatype)
        tensor.set_data_from_numpy(values.reshape(shape), binary_data=binary)
        found.append(tensor)
    return found


@triton
@pytest.mark.parametrize("shape", [(len(ROWS),), (len(ROWS), 1)])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_infers(client, binary, compression, shape):
    from tritonclient import http

    prices = PRICES if binary else [0.0 if price != price else price for price in PRICES]  # noqa: PLR0124  # NaN
    outputs = [http.InferRequestedOutput(name, binary_data=binary) for name in ("score", "unknown")]
    result = client.infer(
        "clicks",
        inputs_of(http, binary=binary, prices=prices, shape=shape),
        outputs=outputs,
        request_id="my id",
        request_compression_algorithm=compression,
    )
    assert result.as_numpy("score") == pytest.approx(SCORES, abs=1e-7)
    assert result.as_numpy("unknown").tolist() == UNKNOWN
    assert result.get_response()["id"] == "my id"


@triton
def test_tritonclient_gets_all_outputs_in_binary(client):
    from tritonclient import http

    result = client.infer("clicks", inputs_of(http, binary=True))
    assert result.as_numpy("score") == pytest.approx(SCORES, abs=1e-7)
    assert result.as_numpy("unknown").shape == (len(ROWS), 2)


@triton
def test_tritonclient_asks_about_the_server(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("clicks")
    assert not client.is_model_ready("clacks")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    found = client.get_model_metadata("clicks")
    assert found["platform"] == "onnxruntime_onnx"
    assert found["inputs"] == [
        {"name": "user", "datatype": "BYTES", "shape": [-1]},
        {"name": "tags", "datatype": "BYTES", "shape": [-1]},
        {"name": "price", "datatype": "FP64", "shape": [-1]},
    ]
    assert [one["name"] for one in found["outputs"]] == ["score", "unknown"]
    [version] = found["versions"]
    assert client.is_model_ready("clicks", version)
    [entry] = client.get_model_repository_index()
    assert entry == {"name": "clicks", "version": version, "state": "READY", "reason": ""}


def tensor(name, datatype, data, shape=(1,), **more):
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": data, **more}


USER, TAGS, PRICE = (
    tensor("user", "BYTES", ["ann"]),
    tensor("tags", "BYTES", ["a"]),
    tensor("price", "FP64", [1]),
)


def test_outputs_are_chosen_and_other_types_are_read(server):
    user = tensor("user", "INT64", [15])
    price = tensor("price", "FP32", [[2]], (1, 1))
    body = {"inputs": [user, TAGS, price], "outputs": [{"name": "score"}]}
    version = server.status["models"][0]["version"]
    answer = server.ask("POST", f"/v2/models/clicks/versions/{version}/infer", body)
    assert answer.status == 200, answer.body
    [output] = answer.json["outputs"]
    assert output["data"] == pytest.approx([expected("15", "a", 2)], abs=1e-7)
    assert answer.json["model_version"] == version
    assert "id" not in answer.json


BAD = {
    "no JSON": (b"x", "not valid JSON"),
    "no inputs": ({}, 'expected a JSON object with a list "inputs"'),
    "an input without a name": ({"inputs": [{}]}, "input 0 must be an object with a name"),
    "a missing input": ({"inputs": [USER]}, "input 'tags' is missing, and 1 more"),
    "an unknown input": ({"inputs": [USER, TAGS, PRICE, tensor("usr", "BYTES", ["x"])]}, "the model reads no input 'usr'; did you mean 'user'?"),
    "an input twice": ({"inputs": [USER, USER]}, "input 'user' is there twice"),
    "no shape": ({"inputs": [{"name": "user", "datatype": "BYTES"}]}, "shape must be one or two sizes, got None"),
    "a wrong shape": ({"inputs": [tensor("user", "BYTES", ["ann"], (-1,))]}, "shape must be one or two sizes"),
    "a huge shape": ({"inputs": [tensor("user", "BYTES", ["ann"], (2**62, 2**62))]}, "shape [4611686018427387904, 4611686018427387904] needs"),
    "too few values": ({"inputs": [tensor("user", "BYTES", ["ann"], (2,))]}, "shape [2] needs 2 values, got 1"),
    "an unknown type": ({"inputs": [tensor("user", "STRING", ["ann"])]}, "unknown datatype 'STRING'"),
    "no data": ({"inputs": [{"name": "user", "datatype": "BYTES", "shape": [1]}]}, "needs a list of data, or binary data"),
    "ragged data": ({"inputs": [tensor("user", "BYTES", [["a"], "b"], (2, 1))]}, "data must be flat, or nested as the shape is"),
    "two columns": ({"inputs": [tensor("user", "BYTES", ["a", "b"], (1, 2)), TAGS, PRICE]}, "input 'user' must be of shape [rows], got [1, 2]"),
    "different rows": ({"inputs": [tensor("user", "BYTES", ["a", "b"], (2,)), TAGS, PRICE]}, "'user' has 2, 'tags' has 1"),
    "zero rows": ({"inputs": [tensor(name, "BYTES", [], (0,)) for name in ("user", "tags", "price")]}, "at least one row"),
    "a wrong value": ({"inputs": [USER, TAGS, tensor("price", "FP64", ["x"])]}, "row 0: column 'price' must be a number or null, got 'x'"),
    "an infinite number": ({"inputs": [USER, TAGS, tensor("price", "FP64", [1e39])]}, "row 0: column 'price' must be a number that fits 32 bits"),
    "an unknown output": ({"inputs": [USER, TAGS, PRICE], "outputs": [{"name": "scores"}]}, "unknown output 'scores'; did you mean 'score'?"),
    "outputs that are no list": ({"inputs": [USER, TAGS, PRICE], "outputs": {"name": 1}}, "outputs must be a list"),
    "an id that is no text": ({"inputs": [USER, TAGS, PRICE], "id": 7}, "id must be a string, got 7"),
    "binary data that is not there": ({"inputs": [{**USER, "parameters": {"binary_data_size": 9}}]}, "binary_data_size is 9, but 0 bytes are left"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_with_what_is_wrong(server, name):
    body, message = BAD[name]
    answer = server.ask("POST", "/v2/models/clicks/infer", body)
    assert answer.status == 400, answer.body
    assert message in answer.error


def test_too_many_rows(server):
    user = tensor("user", "BYTES", ["ann"] * 1001, (1001,))
    answer = server.ask("POST", "/v2/models/clicks/infer", {"inputs": [user]})
    assert answer.status == 413
    assert "1,001 rows" in answer.error


@pytest.mark.parametrize(
    ("raw", "datatype", "message"),
    [
        (b"\x01\x00", "BYTES", "value 0 ends after the tensor"),
        (struct.pack("<I", 9) + b"ann", "BYTES", "value 0 ends after the tensor"),
        (struct.pack("<I", 0xFFFFFFFF) + b"ann", "BYTES", "value 0 ends after the tensor"),
        (struct.pack("<I", 1) + b"\xff", "BYTES", "value 0 is not UTF-8"),
        (b"\x00" * 7, "FP64", "7 bytes are no whole number of FP64"),
    ],
)
def test_wrong_binary_data_is_refused(server, raw, datatype, message):
    entry = {"name": "user", "shape": [1], "datatype": datatype}
    entry["parameters"] = {"binary_data_size": len(raw)}
    head = json.dumps({"inputs": [entry]}).encode()
    path, length = "/v2/models/clicks/infer", "inference-header-content-length"
    answer = server.ask("POST", path, head + raw, {length: str(len(head))})
    assert answer.status == 400
    assert message in answer.error
    more = server.ask("POST", path, head + raw + b"x", {length: str(len(head))})
    assert more.status == 400
    for wrong, text in (
        ("99999", "is 99999, but the body has"),
        ("x", "must be a number, got 'x'"),
    ):
        answer = server.ask("POST", path, head + raw, {length: wrong})
        assert answer.status == 400
        assert text in answer.error


def test_a_model_that_takes_ids(tmp_path):
    from served import serving, write_ids_file

    with serving(write_ids_file(tmp_path / "plain.onnx")) as server:
        ids = tensor("ids", "INT64", [[0, 1], [2, 0]], (2, 2))
        numeric = tensor("numeric", "FP32", [0.5, 1.5], (2, 1))
        path = "/v2/models/plain/infer"
        answer = server.ask("POST", path, {"inputs": [ids, numeric]})
        assert answer.status == 200, answer.body
        [output] = answer.json["outputs"]
        assert output["data"] == pytest.approx(1 / (1 + np.exp(-np.array([1.5, 3.5]))), abs=1e-7)
        refused = server.score({"rows": [{"user": 1}]})
        assert refused.status == 400
        assert "takes ids, not rows; send tensors to /v2/models/plain/infer" in refused.error
        for data, message in (
            ([[0, 2], [0, 0]], "row 0: slot 1 of ids must be below 2, got 2"),
            ([[0, 0], [-1, 0]], "row 1: slot 0 of ids must be below 3, got -1"),
            ([[0.5, 0], [0, 0]], "input 'ids' must hold numbers only, got 0.5"),
        ):
            wrong = tensor("ids", "INT64", data, (2, 2))
            answer = server.ask("POST", path, {"inputs": [wrong, numeric]})
            assert answer.status == 400
            assert message in answer.error


@triton
@pytest.mark.slow
def test_tritonclient_loads_and_unloads(tmp_path):
    from served import serving
    from tritonclient import http
    from tritonclient.utils import InferenceServerException

    path = write_file(tmp_path / "clicks.onnx")
    with serving(path) as server, http.InferenceServerClient(server.url) as client:
        old = client.get_model_metadata("clicks")["versions"]
        write_file(path, bias=1.0)
        client.load_model("clicks")
        assert client.get_model_metadata("clicks")["versions"] != old
        result = client.infer("clicks", inputs_of(http, binary=True))
        assert result.as_numpy("score") == pytest.approx(
            [expected(*row, 1.0) for row in ROWS], abs=1e-7
        )
        with pytest.raises(InferenceServerException, match="no model 'other'"):
            client.load_model("other")
        client.unload_model("clicks")
        assert not client.is_model_ready("clicks")
        assert not client.is_server_ready()
        [entry] = client.get_model_repository_index()
        assert entry["state"] == "UNAVAILABLE"
        with pytest.raises(InferenceServerException, match="no model 'clicks'"):
            client.infer("clicks", inputs_of(http, binary=True))
        client.load_model("clicks")
        assert client.is_model_ready("clicks")
