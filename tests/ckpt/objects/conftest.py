"""One S3 server for the tests of a process, and a bucket with a proxy of its own for each test."""

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("moto.server", reason="needs moto[server]")
pytest.importorskip("obstore", reason="needs obstore")

from tests.support.object_server import Bucket, S3Server, bucket_of


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    with bucket_of(s3_server) as made:
        for name, value in made.env.items():
            monkeypatch.setenv(name, value)
        yield made
