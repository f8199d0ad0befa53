"""Addresses with passwords: they work or are refused, and no message, table or page shows a part of one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.config import ConfigError, load
from services.config.secrets import has_login, shown, split_password, without_secrets
from tests.support.console import config_file, grpo

PASSWORDS = [f"Xq7{mark}Zw9" for mark in ("", "/", "?", "#", "[", "]", "@", ":", "%", "/@", "?a=", "#@[")]
KEYS = {
    "redis.url": "redis://{}host:6379/0",
    "tracing.endpoint": "http://{}host:4318/v1",
    "verifiers": '[{{kind = "http", url = "http://{}host:8080/x"}}]',
    "environments": '[{{kind = "mcp", name = "tools", server = "http://{}host:8080/mcp"}}]',
}


def outcome(file: Path, override: str) -> str:
    """Return what a configuration shows: the message that refuses it, or itself."""
    try:
        return repr(without_secrets("", load(file, [override]).model_dump(mode="json")))
    except ConfigError as error:
        return str(error)


def test_no_part_of_a_password_is_shown(tmp_path: Path) -> None:
    file, wrong = config_file(tmp_path), list[tuple[str, str]]()
    for key, form in KEYS.items():
        for password in PASSWORDS:
            for login in (f":{password}@", f"user:{password}@", f"{password}@"):
                text = outcome(file, f"{key}={form.format(login)}")
                wrong += [(form.format(login), text)] * ("Xq7" in text or "Zw9" in text or key.partition(".")[0] not in text)
    assert wrong == []


def test_a_redis_address_is_split_or_refused_in_one_line() -> None:
    right = {
        "": ("", ""),
        "redis://host:1": ("redis://host:1", ""),
        "redis://:s%40fe@host:1/2": ("redis://host:1/2", "s@fe"),
        "redis://:s@fe@host:1/2": ("redis://host:1/2", "s@fe"),
        "rediss://me:sa:fe@host:1/2": ("rediss://me@host:1/2", "sa:fe"),
        "rediss://:%2F%3F%23%5B@[::1]:1/2": ("rediss://[::1]:1/2", "/?#["),
        "unix:///tmp/a@b/redis.sock": ("unix:///tmp/a@b/redis.sock", ""),
        "unix://me:safe@/tmp/redis.sock": ("unix://me@/tmp/redis.sock", "safe"),
    }
    assert {url: split_password(url) for url in right} == right
    refused = {
        "localhost:6379": "use redis://host:port/0",
        "http://localhost": "use redis://host:port/0",
        "redis://host:port/0": "Port could not be cast",
        "redis://:se/cret@host:1": "write %2F for /",
        "redis://:se[cret@host:1": "%5B for [",
        "redis://[host:1": "Invalid IPv6 URL",
        "redis://host:1/0?client_name=a@b": "write %2F for /",
    }
    for url, reason in refused.items():
        with pytest.raises(ValueError, match=re.escape(reason)) as caught:
            split_password(url)
        assert "cret" not in str(caught.value)


def test_whatever_stands_before_the_last_at_sign_is_hidden() -> None:
    for login in ("user:a", "a", ":a/b", "u:a@b", "u:a?b#c"):
        assert shown("url", f"http://{login}@host/x?token=t&n=1") == "'http://(hidden)@host/x?token=(hidden)&n=1'"
        assert has_login(f"http://{login}@host")
    assert not has_login("http://host/x")
    assert shown("address", "me@host") == "'me@host'"


def test_an_option_with_a_broken_address_is_refused_without_its_password(tmp_path: Path) -> None:
    refused = grpo("status", "run", "--redis-url", "redis://:Xq7[Zw9@host:1/0")
    assert refused.returncode == 2
    assert "%5B for [" in " ".join(refused.stderr.replace("│", " ").split())
    assert "Xq7" not in refused.stderr + refused.stdout
    assert "Zw9" not in refused.stderr + refused.stdout


def test_grpo_config_prints_no_password(tmp_path: Path) -> None:
    for json in ([], ["--json"]):
        done = grpo("config", config_file(tmp_path), "redis.url=redis://me:Xq7Zw9@host:1/0", *json)
        assert done.returncode == 0, done.stderr
        assert "redis://(hidden)@host:1/0" in done.stdout
        assert "Xq7Zw9" not in done.stdout
