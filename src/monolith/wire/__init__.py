"""Protocol messages, as protoc makes them from `proto/*.proto`.

    python -m grpc_tools.protoc -I monolith/wire=proto --python_out=src --pyi_out=src \\
        monolith/wire/example.proto

Needs the package protobuf. Training does not use these: the core reads and writes examples itself, and the
tests hold it against these. Messages stop at the border of the room that sends or receives them.
"""
