"""The shapes of measured models, which the tests of plan use too."""

from tests.plan.conftest import demo_shape, measured_job  # noqa: F401
