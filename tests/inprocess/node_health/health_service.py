"""A health service at a Unix socket, made of gRPC and protocol buffers: `health_service.py SOCKET`.

It answers each line of its standard input: {"success": ..., ...} is the next response, {"sleep_s": ...} comes too late.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_STRING, _INT32, _BOOL = 9, 5, 8  # of descriptor.proto
_OPTIONAL, _REPEATED = 1, 3


def message_classes() -> tuple[Any, Any]:
    """The classes of the request and the response."""
    file = descriptor_pb2.FileDescriptorProto(name="nvhcd.proto", package="nvhcd", syntax="proto3")
    fields = {
        "HealthCheckRequest": [("args", _STRING, _REPEATED)],
        "HealthCheckResponse": [
            ("success", _BOOL, _OPTIONAL),
            ("exit_code", _INT32, _OPTIONAL),
            ("output", _STRING, _OPTIONAL),
            ("error", _STRING, _OPTIONAL),
        ],
    }
    for name, members in fields.items():
        message = file.message_type.add(name=name)
        for number, (member, kind, label) in enumerate(members, 1):
            message.field.add(name=member, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"nvhcd.{name}") for name in fields)
    request, response = (message_factory.GetMessageClass(each) for each in found)
    return request, response


def main() -> None:
    request_class, response_class = message_classes()
    answer: dict[str, Any] = {}

    def run_health_check(request: Any, _context: Any) -> Any:
        time.sleep(answer.get("sleep_s", 0.0))
        values = {name: value for name, value in answer.items() if name != "sleep_s"}
        if list(request.args) != ["--no-slurm"]:
            values = {"success": False, "error": f"called with {list(request.args)}"}
        return response_class(**values)

    handler = grpc.unary_unary_rpc_method_handler(
        run_health_check,
        request_deserializer=request_class.FromString,
        response_serializer=response_class.SerializeToString,
    )
    server = grpc.server(ThreadPoolExecutor(2))
    service = grpc.method_handlers_generic_handler("nvhcd.HealthCheckService", {"RunHealthCheck": handler})
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"unix:{sys.argv[1]}")
    server.start()
    print("listening", flush=True)
    for line in sys.stdin:
        answer.clear()
        answer.update(json.loads(line))
        print("set", flush=True)
    server.stop(0)


if __name__ == "__main__":
    main()
