from tests.accelerator.fixture import (  # noqa: F401
    accelerator,
    pytest_collection_finish,
    pytest_pyfunc_call,
)
