import uuid

import pytest


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path) -> str:
    """An empty folder, once on a local disk and once on fsspec's memory filesystem."""
    if request.param == "local":
        return str(tmp_path)
    import fsspec

    path = f"memory://{uuid.uuid4().hex}"
    fsspec.filesystem("memory").makedirs(path)
    return path
