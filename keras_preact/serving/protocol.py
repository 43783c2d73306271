"""HTTP connections that cannot be held for nothing: limits on the time and the bytes
before and around a body.
"""

import json

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

#: Bytes of a request that are not its body: its headers, and what frames the chunks of one without
#: a length.
MAX_HEAD_BYTES = 64 * 1024
# A chunk of one byte takes six to send; a body in such small pieces is still taken.
_FRAME_PER_BYTE = 8


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1, which by itself waits for ever for the rest of a request's
    headers, however many come.

    `config.timeout_keep_alive` is the time that a client has to send the headers, and
    to take some of an answer.
    """

    _timer = None
    _surplus = 0
    _watching = False
    _left: float = 0

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timer is None and self.timeout_keep_alive_task is not None:
            self._arm()  # uvicorn takes its own timer off at the first byte
        self._surplus += len(data)
        super().data_received(data)
        if self._surplus > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"The headers of a request may have {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._surplus = 0
        if self._timer is None:
            self._arm()

    def on_headers_complete(self) -> None:
        self._disarm()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._surplus -= (1 + _FRAME_PER_BYTE) * len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._left = float("inf")  # the client takes some of it, however much is written meanwhile

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "This is not HTTP.")

    def _refuse(self, status: int, message: str) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps({"error": message}).encode()
            head = (
                b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
                % len(body)
            )
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.timeout_keep_alive, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._arm()  # the answer to an earlier request is still to go out
        else:
            self.transport.close()

    def _watch(self) -> None:
        if not self._watching:
            self._left = float("inf")
            self._check_taken()

    def _check_taken(self) -> None:
        """End a connection whose client takes nothing of an answer."""
        left = self.transport.get_write_buffer_size()
        self._watching = left > 0
        if left >= self._left:
            self.transport.abort()
        elif left:
            self._left = left
            self.loop.call_later(self.timeout_keep_alive, self._check_taken)
