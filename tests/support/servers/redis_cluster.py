"""A Redis Cluster of real servers: three masters, and a replica of one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from services.console.run.redis_server import RedisServer
from services.console.run.secrets import kept_secret, user_passwords, write_secret
from services.protocol.keys import Keys, user_name
from services.runtime.process_tools import free_port
from services.store.client import Login
from tests.support.servers.certificates import Certificates

MASTERS, SLOTS = 3, 16384
LIMIT_S = 60.0


class RedisCluster:
    """Servers in `folder` with the users of `run`.

    The first owns the slot of the run's keys; the last is a replica of node number `replicated`.
    """

    def __init__(
        self, folder: Path, program: str, run: str, certificates: Certificates | None = None, replicated: int = 0
    ) -> None:
        self.run, self.slot = run, key_slot(Keys(run).prefix.encode())
        self.password = kept_secret(folder / "password")
        self.users = user_passwords(folder / "users")
        self._certificates = certificates
        self.nodes = [self._node(folder / str(i), program) for i in range(MASTERS + 1)]
        self.owner, self.other, self.third, self.replica = self.nodes
        self.replicated = self.nodes[replicated]
        self._ids: dict[RedisServer, str] = {}

    def _node(self, folder: Path, program: str) -> RedisServer:
        folder.mkdir()
        write_secret(folder / "password", self.password)
        for kind, password in self.users.items():
            write_secret(folder / "users" / kind, password)
        node = RedisServer(folder, program=program, run=self.run)
        node._options |= {
            "cluster-enabled": "yes", "cluster-port": str(free_port()), "masterauth": self.password,
            "cluster-node-timeout": "5000", "repl-diskless-sync-delay": "0",
        }  # fmt: skip
        if files := self._certificates:
            node._options |= {
                "tls-port": str(free_port()), "tls-cert-file": str(files.certificate), "tls-key-file": str(files.key),
                "tls-ca-cert-file": str(files.authority), "tls-auth-clients": "no", "tls-cluster": "yes",
                "tls-replication": "yes",
            }  # fmt: skip
        return node

    def url(self, node: RedisServer) -> str:
        """Return a node's address for a run."""
        return f"redis{'' if self._certificates is None else 's'}://127.0.0.1:{self._port(node)}/0"

    @staticmethod
    def _port(node: RedisServer) -> int:
        """Return the port by which the other nodes of the cluster know a node."""
        return int(node._options.get("tls-port", node.port))

    def login(self, kind: str = "") -> Login:
        """Return the login of a kind of service, or of the administrator."""
        ca_file = "" if self._certificates is None else str(self._certificates.authority)
        return Login(self.users[kind], user_name(self.run, kind), ca_file) if kind else Login(self.password, ca_file=ca_file)

    def start(self) -> None:
        """Start the servers and wait until all of them serve."""
        for node in self.nodes:
            node.start()
        first = SLOTS // MASTERS
        for i, node in enumerate((self.owner, self.other, self.third)):
            # One third each, starting with the owner of the run's slot.
            begin = (self.slot // first + i) % MASTERS * first
            self.call(node, "CLUSTER", "ADDSLOTSRANGE", begin, SLOTS - 1 if begin == 2 * first else begin + first - 1)
            self.call(node, "CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for node in self.nodes:
            self._ids[node] = self.call(node, "CLUSTER", "MYID").decode()
            self.call(self.owner, "CLUSTER", "MEET", "127.0.0.1", self._port(node), node._options["cluster-port"])
        master = self._ids[self.replicated].encode()
        self.wait(lambda: master in self.call(self.replica, "CLUSTER", "NODES"))
        self.call(self.replica, "CLUSTER", "REPLICATE", master.decode())
        self.wait(lambda: all(self._agrees(node) for node in self.nodes))
        self.wait(lambda: b"master_link_status:up" in self.call(self.replica, "INFO", "replication"))

    def _agrees(self, node: RedisServer) -> bool:
        """Return whether a node knows all nodes by name, has finished its handshakes, and knows the owner of every slot."""
        known = self.call(node, "CLUSTER", "NODES").decode()
        return (
            all(name in known for name in self._ids.values())
            and "handshake" not in known
            and b"cluster_state:ok" in self.call(node, "CLUSTER", "INFO")
            and len(self.slots(node)) >= MASTERS
        )

    def kill(self) -> None:
        """Kill all servers."""
        for node in self.nodes:
            node.kill()

    def call(self, node: RedisServer, *command: Any) -> Any:
        """Send a command to one node as its administrator; return the raw reply."""
        with redis.Redis(port=node.port, password=self.password, protocol=2) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def slots(self, node: RedisServer) -> list[list[Any]]:
        """Return the slot ranges as a node sees them: first, last, master, replicas."""
        return self.call(node, "CLUSTER", "SLOTS")

    def wait(self, true: Callable[[], bool]) -> None:
        """Wait until the condition holds."""
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, [self.call(node, "CLUSTER", "NODES") for node in self.nodes if node.alive]
            time.sleep(0.02)

    def serves(self, node: RedisServer) -> bool:
        """Return whether a node considers itself a master with slots."""
        lines = self.call(node, "CLUSTER", "NODES").decode().splitlines()
        mine = next(line for line in lines if "myself" in line)
        return "master" in mine and any("[" not in part for part in mine.split()[8:])

    def fail_over(self, to: RedisServer) -> None:
        """Fail over in an orderly way: the old master hands over everything that it has acknowledged."""
        self.call(to, "CLUSTER", "FAILOVER")
        self.wait(lambda: self.serves(to))

    def take_over(self, to: RedisServer) -> None:
        """Fail over without the old master, which is down."""
        self.call(to, "CLUSTER", "FAILOVER", "TAKEOVER")
        self.wait(lambda: self.serves(to))

    def move_slot(self, source: RedisServer, target: RedisServer, halfway: Callable[[], None], slot: int = -1) -> int:
        """Move a slot, by default the run's, key by key as `redis-cli --cluster reshard` does.

        `halfway` is called after the first batch of keys. Return the number of keys moved.
        """
        slot = self.slot if slot < 0 else slot
        self.call(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", self._ids[source])
        self.call(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", self._ids[target])
        moved = 0
        while keys := self.call(source, "CLUSTER", "GETKEYSINSLOT", slot, 5):
            self.call(source, "MIGRATE", "127.0.0.1", self._port(target), "", 0, 5000, "AUTH", self.password, "KEYS", *keys)
            moved += len(keys)
            if moved == len(keys):
                halfway()
        for node in (target, source):
            self.call(node, "CLUSTER", "SETSLOT", slot, "NODE", self._ids[target])
        return moved


@contextmanager
def redis_cluster(
    folder: Path, program: str, run: str, certificates: Certificates | None = None, replicated: int = 0
) -> Iterator[RedisCluster]:
    """Run a cluster."""
    cluster = RedisCluster(folder, program, run, certificates, replicated)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()
