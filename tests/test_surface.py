"""The public names: exactly these, each importable, each described."""

import recap_ctr


def test_public_names_are_listed_once_and_resolve() -> None:
    assert sorted(recap_ctr.__all__) == sorted(recap_ctr._PUBLIC)
    for name in recap_ctr.__all__:
        value = getattr(recap_ctr, name)
        assert isinstance(value, dict) or value.__doc__, f"{name} has no docstring"


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(recap_ctr, "nonsense")
