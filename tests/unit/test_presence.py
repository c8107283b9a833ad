"""What a machine is said to have is never skipped."""

import pytest

from tests.services.presence import SERVICES, VARIABLE, require


@pytest.fixture
def said(monkeypatch):
    return lambda names: monkeypatch.setenv(VARIABLE, names)


@pytest.mark.parametrize("service", SERVICES)
def test_what_must_be_there_and_is_not_fails(said, service):
    said(f"{service},{SERVICES[0]}")
    with pytest.raises(pytest.fail.Exception, match=f"no {service}, and .* only root may"):
        require(service, "only root may")


@pytest.mark.parametrize("names", ["", "browser", "browser,netns"])
def test_what_nobody_insists_on_is_skipped_with_its_reason(said, names):
    said(names)
    with pytest.raises(pytest.skip.Exception, match="no ceph: only root may"):
        require("ceph", "only root may")


@pytest.mark.parametrize("names", ["", "ceph"])
def test_with_no_problem_the_test_runs(said, names):
    said(names)
    require("ceph", "")


def test_a_misspelt_service_is_refused(said):
    said("cephs")
    with pytest.raises(pytest.fail.Exception, match="knows no cephs; there are browser, ceph"):
        require("ceph", "")
