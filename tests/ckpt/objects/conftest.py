"""S3 and SSH servers and a writer for the tests of a process, and a bucket with a proxy of its own for each test.

`bucket` is in moto, `ceph_bucket` in Ceph; `any_bucket` is one of each, for tests of what they must have in common.
"""

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("moto.server", reason="needs moto[server]")
pytest.importorskip("obstore", reason="needs obstore")

from ckpt import AsyncCallsQueue
from tests.support.ceph_server import CephServer, missing_ceph
from tests.support.object_server import Bucket, S3Server, Server, bucket_of
from tests.support.selection import full_only
from tests.support.sftp_server import SftpServer, missing_sshd


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(scope="session")
def ceph_server() -> Iterator[CephServer]:
    if (missing := missing_ceph()) is not None:
        pytest.skip(missing)
    with CephServer() as server:
        yield server


@pytest.fixture(scope="session")
def sftp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftpServer]:
    pytest.importorskip("paramiko", reason="needs paramiko")
    if (missing := missing_sshd()) is not None:
        pytest.skip(missing)
    with SftpServer(tmp_path_factory.mktemp("sshd") / "server") as server:
        yield server


@pytest.fixture(scope="session")
def queue() -> Iterator[AsyncCallsQueue]:
    """The writer of jobs that need none of their own: to start one costs more than what most tests save."""
    with AsyncCallsQueue() as queue:
        yield queue


@pytest.fixture(scope="session")
def other_queue() -> Iterator[AsyncCallsQueue]:
    """Another writer, for the second of two jobs at a time."""
    with AsyncCallsQueue() as queue:
        yield queue


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    yield from _bucket(s3_server, monkeypatch)


@pytest.fixture
def ceph_bucket(ceph_server: CephServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    yield from _bucket(ceph_server, monkeypatch)


@pytest.fixture(params=["bucket", "ceph_bucket"])
def any_bucket(request: pytest.FixtureRequest) -> Bucket:
    found: Bucket = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["bucket", pytest.param("ceph_bucket", marks=full_only)])
def job_bucket(request: pytest.FixtureRequest) -> Bucket:
    """Like `any_bucket`, for tests with whole jobs: `test_conformance` has every operation of theirs in both."""
    found: Bucket = request.getfixturevalue(request.param)
    return found


def _bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    with bucket_of(server) as made:
        for name, value in made.env.items():
            monkeypatch.setenv(name, value)
        yield made
