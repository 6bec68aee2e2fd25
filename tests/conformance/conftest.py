"""Fixtures: packages of clients in other languages, and of those that do not go together with the extra `dev`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.programs import install


@pytest.fixture(scope="session")
def node_packages(request: pytest.FixtureRequest) -> Path:
    """The folder in which Node finds its clients."""
    return _install(request, "package.json")


@pytest.fixture(scope="session")
def python_packages(request: pytest.FixtureRequest) -> Path:
    """The folder in which Python finds LlamaIndex, which asks for an older OpenAI client than the one under test."""
    return _install(request, "requirements.txt")


def _install(request: pytest.FixtureRequest, manifest: str) -> Path:
    assert request.config.cache is not None
    return install(request.config.cache, manifest)
