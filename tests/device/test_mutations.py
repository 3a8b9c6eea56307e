"""What ``make test-mutations`` goes through exists: no excuse is left of what is gone."""

import mutations
import pytest

pytestmark = pytest.mark.gpu


def test_each_excuse_is_of_a_site_and_each_site_is_once():
    keys = [site.key for site in mutations.all_sites()]
    assert len(keys) > 70
    assert len(keys) == len(set(keys))
    assert mutations.excuses().keys() <= set(keys)
    assert all(len(why) > 20 for why in mutations.excuses().values())
