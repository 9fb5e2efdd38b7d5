"""Where the server is and how to speak to it; makes the channels of clients and workers."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import grpc.aio

Metadata = tuple[tuple[str, str], ...]

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.max_receive_message_length", 4 * 1024 * 1024),
    ("grpc.max_send_message_length", 4 * 1024 * 1024),
    # Our own retries know about request ids; the channel's must not run beneath them.
    ("grpc.enable_retries", 0),
)
# Channels to one address share a connection unless told otherwise; a session that moves
# to another server needs a connection of its own.
_OWN_CONNECTION: tuple[tuple[str, int], ...] = (("grpc.use_local_subchannel_pool", 1),)
# Reconnecting is paced by the session's own backoff, so the channel's may be short.
_QUICK: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Address, tenant and credentials of one server or fleet."""

    address: str
    tenant: str = "default"
    channel_credentials: grpc.ChannelCredentials | None = None
    token: str | None = None

    @property
    def parent(self) -> str:
        """tenants/{tenant}"""
        return f"tenants/{self.tenant}"

    @property
    def metadata(self) -> Metadata:
        """What every call carries."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def queue_name(self, queue: str) -> str:
        """The resource name of a queue given by either form."""
        return queue if "/" in queue else f"{self.parent}/queues/{queue}"

    def job_name(self, job: str) -> str:
        """The resource name of a job given by either form."""
        return job if "/" in job else f"{self.parent}/jobs/{job}"

    def open_client_channel(self) -> grpc.aio.Channel:
        """A channel for unary calls. Needs a running event loop."""
        options = (*_OPTIONS, *_QUICK)
        if self.channel_credentials is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        return grpc.aio.secure_channel(self.address, self.channel_credentials, options=options)

    def open_session_channel(self) -> grpc.Channel:
        """A channel with a connection of its own, free of any event loop."""
        options = (*_OPTIONS, *_OWN_CONNECTION, *_QUICK)
        if self.channel_credentials is None:
            return grpc.insecure_channel(self.address, options=options)
        return grpc.secure_channel(self.address, self.channel_credentials, options=options)
