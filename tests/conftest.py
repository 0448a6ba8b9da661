"""What all tests share: hypothesis runs the same examples every time, and the caller's environment stays out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "loadmaster", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=False
)
settings.load_profile("loadmaster")

_LEAKING = (
    *("LOADMASTER_", "OMP_", "KMP_", "GOMP_", "MKL_", "TORCHELASTIC_", "RAY_", "SLURM_", "FLUX_"),
    *("OMPI_", "PMI_", "PMIX_", "MPI_", "PALS_", "MV2_", "CROSS_"),
)
_LEAKING_NAMES = {"LOCAL_WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "WORLD_SIZE", "RANK"}


@pytest.fixture(scope="session")
def lease_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where leases lie in all tests, so that none sees those of the machine."""
    return tmp_path_factory.mktemp("leases")


@pytest.fixture(autouse=True)
def plain_environment(lease_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every variable that Loadmaster reads out of the environment, whatever the machine has set."""
    for name in list(os.environ):
        if name.startswith(_LEAKING) or name in _LEAKING_NAMES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("LOADMASTER_DIR", str(lease_folder))
