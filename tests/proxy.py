"""A reverse proxy that serves an endpoint below a path, as jupyter-server-proxy does."""

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Proxy:
    """A reverse proxy for the life of a ``with`` block.

    It removes the prefix from the path of each request, and passes the pieces of an answer on as they come.

    Args:
        host: the address of the endpoint, and of the proxy.
        port: the endpoint's port.
        prefix: the path that stands for the endpoint's ``/``, with a slash at both ends.
        streams: whether pieces are passed on as they come. False: after the end of the answer, as by a proxy
            with a buffer.

    Attributes:
        port: the proxy's own port.
    """

    def __init__(self, host, port, prefix, *, streams=True):
        handler = type("Bound", (Handler,), {"upstream": (host, port), "prefix": prefix, "streams": streams})
        self.server = ThreadingHTTPServer((host, 0), handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.1,))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.thread.join()
        self.server.socket.close()  # server_close would wait for the connections that browsers keep


class Handler(BaseHTTPRequestHandler):
    """Passes the requests of a connection on."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        """Pass a request on, and its answer back; refuse a path without the prefix."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.path.startswith(self.prefix):
            self.send_error(404)
            return
        upstream = http.client.HTTPConnection(*self.upstream, timeout=60)
        try:
            upstream.request(self.command, self.path[len(self.prefix) - 1 :], body, dict(self.headers))
            self._pass_on(upstream.getresponse())
        except (OSError, http.client.HTTPException):  # the endpoint has ended, or the connection was cut
            self.close_connection = True
        finally:
            upstream.close()

    do_POST = do_GET  # noqa: N815 - the name that the base class looks for

    def _pass_on(self, answer):
        pieces = iter(lambda: answer.read1(1 << 16), b"") if self.streams else [answer.read()]
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in filter(None, pieces):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *arguments):
        """Log nothing."""
