"""Which checkpoint do hosts have in common that have directories of their own?"""

from __future__ import annotations

import pytest

from unisono.training.resume import newest_common


@pytest.mark.parametrize(
    ("held", "newest"),
    [
        ([{2: "a", 4: "b", 6: "c"}, {2: "a", 4: "b", 6: "c"}], 6),
        ([{2: "a", 4: "b"}, {4: "b", 6: "c"}], 4),
        ([{2: "a", 4: "b"}, {2: "a", 4: "of another past"}, {2: "a", 4: "b"}], 2),
        ([{2: "a"}, {4: "a"}], None),
        ([{2: "a"}, {}], None),
        ([{}, {}, {}], None),
    ],
)
def test_the_newest_checkpoint_that_all_have_with_the_same_contents(held, newest):
    assert newest_common(held) == newest
    assert newest_common(held[::-1]) == newest
