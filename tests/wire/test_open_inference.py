"""The messages are those of the published protocol."""

import re
from pathlib import Path

import pytest

from monolith.wire.open_inference import SERVICE, message_pool, message_types, service_methods

PROTO = Path(__file__).parents[2] / "proto/open_inference.proto"


def fields_of(message):
    return {
        (message.full_name, one.name): (one.number, one.type, one.is_repeated) for one in message.fields
    } | {key: value for nested in message.nested_types for key, value in fields_of(nested).items()}


def test_what_is_read_is_what_the_proto_file_says():
    said = re.findall(r"^\s+(?:[\w.<>, ]+) (\w+) = (\d+);", PROTO.read_text(), re.M)
    file = message_pool().FindFileContainingSymbol(SERVICE)
    ours = [
        (name[1], str(found[0]))
        for message in file.message_types_by_name.values()
        for name, found in fields_of(message).items()
        if not name[0].endswith("Entry")
    ]
    assert sorted(said) == sorted(ours)
    assert set(re.findall(r"rpc (\w+)\(", PROTO.read_text())) == set(service_methods())


def test_every_field_and_method_is_the_same_to_other_clients():
    triton = pytest.importorskip("tritonclient.grpc.service_pb2").DESCRIPTOR
    file = message_pool().FindFileContainingSymbol(SERVICE)
    for name, message in file.message_types_by_name.items():
        theirs = fields_of(triton.message_types_by_name[name])
        assert {key: theirs.get(key) for key in fields_of(message)} == fields_of(message)
    methods = triton.services_by_name["GRPCInferenceService"].methods_by_name
    for name, (request, answer) in service_methods().items():
        assert methods[name].input_type.full_name == request.DESCRIPTOR.full_name
        assert methods[name].output_type.full_name == answer.DESCRIPTOR.full_name


def test_messages_of_other_packages_by_the_same_names_do_no_harm():
    theirs = pytest.importorskip("tritonclient.grpc.service_pb2")
    ours = message_types().ModelInferRequest(model_name="m", raw_input_contents=[b"x"])
    assert theirs.ModelInferRequest.FromString(ours.SerializeToString()).model_name == "m"
