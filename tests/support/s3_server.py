"""An S3 server for tests and benchmarks: moto's, of requirements/s3.txt.

It answers clients of Google's buckets, too: their XML interface has the requests of S3, but for the header of who asks.
"""

from __future__ import annotations

import sys
from typing import Any


def s3_server(port: int) -> list[str]:
    """Return the command that serves S3 at a port of this machine."""
    return [sys.executable, __file__, "-H", "127.0.0.1", "-p", str(port)]


def main() -> Any:
    """Serve; moto reads the command line."""
    from moto import server
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication as Application

    answer = Application.__call__

    def as_for_s3(self: Application, environ: dict[str, Any], start_response: Any) -> Any:
        if not environ.get("HTTP_AUTHORIZATION", "").startswith("AWS"):  # moto looks for the name of a service in it
            environ["HTTP_AUTHORIZATION"] = "AWS tests:tests"
        return answer(self, environ, start_response)

    Application.__call__ = as_for_s3  # type: ignore[method-assign]
    return server.main()


if __name__ == "__main__":
    sys.exit(main())
