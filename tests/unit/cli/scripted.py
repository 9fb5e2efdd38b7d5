"""A real gRPC server that answers each method as a test tells it to."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from fencepost.v1 import (
    admin_service_pb2_grpc,
    job_service_pb2_grpc,
    run_service_pb2_grpc,
)
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

Answer = Callable[[Any], Any]


class Refusal(Exception):
    """What a scripted method raises to refuse a call, with the details a server would send."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        field: str = "",
        resource: str = "",
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details: list[Any] = []
        if reason:
            info = error_details_pb2.ErrorInfo(reason=reason, domain="fencepost.dev")
            self.details.append(info)
        if field:
            violation = error_details_pb2.BadRequest.FieldViolation(field=field, description="")
            self.details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        if resource:
            self.details.append(error_details_pb2.ResourceInfo(resource_name=resource))
        if request_id:
            self.details.append(error_details_pb2.RequestInfo(request_id=request_id))


@dataclass
class ScriptedServer:
    """Answers each method from its queue; the last answer is repeated."""

    address: str = ""
    answers: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    requests: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def on(self, method: str, *answers: Answer | Any) -> None:
        """Answer `method` with messages, refusals, or functions of the request."""
        self.answers[method] += [
            answer if callable(answer) else _always(answer) for answer in answers
        ]

    def handle(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        with self.lock:
            self.requests[method].append(request)
            queue = self.answers[method]
            answer = queue.pop(0) if len(queue) > 1 else queue[0] if queue else None
        if answer is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served")
        said = answer(request)
        if isinstance(said, Refusal):
            _refuse(context, said)
        return _stream(context, said) if isinstance(said, list) else said


def _stream(context: grpc.ServicerContext, messages: list[Any]) -> Iterator[Any]:
    """A list answers a streaming method; a refusal in it breaks the stream there."""
    for message in messages:
        if isinstance(message, Refusal):
            _refuse(context, message)
        yield message


def _always(answer: Any) -> Answer:
    return lambda _: answer


def _refuse(context: grpc.ServicerContext, refusal: Refusal) -> None:
    status = status_pb2.Status(code=refusal.code.value[0], message=refusal.message)
    for detail in refusal.details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    if refusal.details:
        metadata = (("grpc-status-details-bin", status.SerializeToString()),)
        context.set_trailing_metadata(metadata)
    context.abort(refusal.code, refusal.message)


def _scripted(base: type, server: ScriptedServer) -> Any:
    def method(name: str) -> Callable[..., Any]:
        return lambda self, request, context: server.handle(name, request, context)

    names = [name for name in vars(base) if name[0].isupper()]
    return type(f"Scripted{base.__name__}", (base,), {name: method(name) for name in names})()


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@contextmanager
def serving() -> Iterator[ScriptedServer]:
    """A scripted server on a free port."""
    script = ScriptedServer()
    grpc_server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    for module, name in (
        (job_service_pb2_grpc, "JobService"),
        (run_service_pb2_grpc, "RunService"),
        (admin_service_pb2_grpc, "AdminService"),
    ):
        servicer = _scripted(getattr(module, f"{name}Servicer"), script)
        getattr(module, f"add_{name}Servicer_to_server")(servicer, grpc_server)
    script.address = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
    grpc_server.start()
    yield script
    grpc_server.stop(grace=None).wait()
