"""Names that peers give themselves, as others read them."""

from __future__ import annotations

import pytest

from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.fields import is_display_name
from spes_p2p.messages.presence import Named


@pytest.mark.parametrize("text", ["Ada", "Ada L. 2", "O'Neil-3", "night_owls", "Зоя", "東京", "नमस्ते", "x" * 24])
def test_names_of_all_scripts_are_names(text: str) -> None:
    assert is_display_name(text)
    assert unpack(Named, pack(Named("a", text, text))).name == text


@pytest.mark.parametrize("text", [
    "<b>", "a|b", "a`b", "[a](b)", "a\x1b[31m", "a\nb", "a\u202eb", "a\u200bb", " a", "a ", "1234", "-", "x" * 25, "a&b",
])
def test_what_could_change_a_page_a_terminal_or_a_table_is_refused(text: str) -> None:
    assert not is_display_name(text)
    with pytest.raises(WireError):
        unpack(Named, pack(Named("a", text, "")))
