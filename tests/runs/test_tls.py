"""TLS to Redis and on the endpoints: untrusted peers are rejected."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from services.config import ConfigError
from services.config.root import Api
from services.console.run.redis_server import RedisServer
from services.http.api import serve
from services.http.asking import Unanswered, ask
from services.http.credentials import ApiTokens
from services.protocol.errors import StoreError
from services.protocol.messages import PodStatus
from services.runtime.portal import Portal
from services.runtime.process_tools import free_port
from services.runtime.service import Service
from services.store import Store
from services.store.client import Login
from tests.support.harness import small_config
from tests.support.servers.certificates import Certificates, make_certificates, put

START_S = 20.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make certificates with")
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def renewed(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Make certificates for the same name from another authority."""
    return make_certificates(tmp_path_factory.mktemp("renewed"))


@pytest.fixture
def encrypted(certificates: Certificates, tmp_path: Path) -> Iterator[str]:
    """Start a Redis that accepts only TLS, and yield its address."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server that speaks TLS")
    port = free_port()
    command = [
        program, "--port", "0", "--tls-port", str(port), "--tls-cert-file", str(certificates.certificate), "--tls-key-file",
        str(certificates.key), "--tls-ca-cert-file", str(certificates.authority), "--tls-auth-clients", "no", "--save", "",
        "--requirepass", "secret", "--dir", str(tmp_path),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    deadline = time.monotonic() + START_S
    while "Ready to accept connections" not in (line := process.stdout.readline()):
        if not line or time.monotonic() > deadline:
            pytest.skip("this redis-server does not speak TLS")
    yield f"rediss://127.0.0.1:{port}/0"
    process.kill()
    process.wait()
    process.stdout.close()


async def test_redis_works_over_tls_with_renewed_certificates(
    encrypted: str, certificates: Certificates, renewed: Certificates, tmp_path: Path
) -> None:
    mounted = put(certificates, tmp_path)
    store = await Store.connect(encrypted, "tls", Login("secret", ca_file=str(mounted.authority)))
    try:
        assert await store.run.create("config", "data", 4, 8)
        fence = await store.run.attach_trainer()
        assert await store.steps.publish(fence, 0)
        put(renewed, tmp_path)
        files = {"tls-cert-file": renewed.certificate, "tls-key-file": renewed.key, "tls-ca-cert-file": renewed.authority}
        pairs = [str(word) for pair in files.items() for word in pair]
        assert await store.client.execute_command("CONFIG", "SET", *pairs) in (b"OK", "OK", True)
        await store.client.client_kill_filter(_type="normal", skipme=False)
        assert await store.run.state(), "a new connection trusts the authority now in the file"
        await store.restores.delete_run()
    finally:
        await store.close()
    with pytest.raises(StoreError, match="cannot be reached"):
        await Store.connect(encrypted, "tls", Login("secret"))
    with pytest.raises(StoreError, match=r"redis\.ca_file = .* name a file of certificates"):
        await Store.connect(encrypted, "tls", Login("secret", ca_file="/dev/null"))


def test_endpoints_work_over_tls_with_renewed_certificates(
    certificates: Certificates, renewed: Certificates, tmp_path: Path, server: RedisServer
) -> None:
    config = small_config(tmp_path, server, "run.name=tls")
    mounted = put(certificates, tmp_path)
    (folder := tmp_path / "secret").mkdir()
    (folder / "tls.crt").symlink_to(mounted.certificate)
    (folder / "tls.key").symlink_to(mounted.key)
    config = config.model_copy(update={"api": config.api.model_copy(update={"certificate_file": str(folder)})})
    portal = Portal()
    try:
        store = portal.call(Store.connect(server.url, "tls", server.password))
        service = Service("trainer", config, store, PodStatus("trainer", "t", "b", "here", 1, "", "ready", 0, 0, {}))
        served = serve(service, ApiTokens("operate", "read"))
        url = portal.call(served.__aenter__())
        try:
            assert url.startswith("https://127.0.0.1:")
            trusting = Api(ca_file=str(certificates.authority))
            assert ready(url, trusting)
            assert ask(trusting, "POST", f"{url}/v1/pause", token="operate", body={"why": "a test"})["why"] == "REST: a test"
            assert ask(trusting, "GET", f"{url}/v1/state", token="operate")["pod"]["name"] == "t"
            ask(trusting, "POST", f"{url}/v1/resume", token="operate", body={})
            with pytest.raises(Unanswered, match="cannot be reached"):
                ask(trusting, "GET", f"{url}/health/ready", server_name="another")
            with pytest.raises(Unanswered, match="cannot be reached"):
                ready(url, Api())
            with pytest.raises(Unanswered):
                ready(url.replace("https", "http"), trusting)
            renew(url, certificates, renewed, tmp_path)
        finally:
            portal.call(served.__aexit__(None, None, None))
            portal.call(store.restores.delete_run())
            portal.call(store.close())
    finally:
        portal.close()


def ready(url: str, api: Api) -> bool:
    return ask(api, "GET", f"{url}/health/ready", accepted=503)["ready"]


def renew(url: str, before: Certificates, after: Certificates, folder: Path) -> None:
    """Renew a certificate at the second attempt; the first does not match its key, which is logged once."""

    def reached(trusted: Certificates) -> bool:
        try:
            return ready(url, Api(ca_file=str(trusted.authority)))
        except Unanswered:
            return False

    trusting = ssl.create_default_context(cafile=str(before.authority))
    with httpx.Client(verify=trusting, base_url=url) as kept, capture_logs() as logs:
        assert kept.get("/health/ready").json()["ready"]
        put(replace(after, key=before.key), folder)
        assert [reached(before), reached(before), reached(after)] == [True, True, False]
        (line,) = logs
        assert "api.certificate_file" in line["error"]
        assert "set it to a file with a certificate and its key" in line["error"]
        put(after, folder)
        assert [reached(after), reached(before), reached(after)] == [True, False, True]
        assert [entry["event"] for entry in logs[1:]] == ["certificate renewed"]
        assert kept.get("/health/ready").json()["ready"], "the existing connection keeps working"


async def test_a_certificate_without_its_key_is_an_error(
    certificates: Certificates, tmp_path: Path, server: RedisServer, store: Store
) -> None:
    with pytest.raises(ConfigError, match=r"redis\.ca_file = .* has no effect"):
        small_config(tmp_path, server, f"redis.ca_file={certificates.authority}")
    config = small_config(tmp_path, server)
    files = {"certificate_file": str(certificates.certificate)}
    config = config.model_copy(update={"api": config.api.model_copy(update=files)})
    service = Service("trainer", config, store, PodStatus("trainer", "t", "b", "here", 1, "", "ready", 0, 0, {}))
    with pytest.raises(ConfigError, match=r"cannot be used .* set it to a file with a certificate and its key"):
        async with serve(service, ApiTokens("operate")):
            pass
