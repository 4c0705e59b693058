"""The error tree is complete: every class has its own code, a status, and survives the wire."""

import diamond.core.errors as errors


def test_every_class_has_its_own_code_and_a_status() -> None:
    found = errors.all_errors()
    codes = [cls.code for cls in found]
    assert len(codes) == len(set(codes))
    assert len(found) >= 15
    for cls in found:
        assert 400 <= cls.status < 600
        assert cls.__name__ in (errors.__doc__ or ""), f"{cls.__name__} is missing from the drawn tree"


def test_an_error_survives_the_wire() -> None:
    for cls in errors.all_errors():
        sent = cls("it broke", hint="mend it", field="a.b")
        received = errors.error_from_json(sent.to_json())
        assert type(received) is cls
        assert (received.message, received.hint, received.field) == ("it broke", "mend it", "a.b")


def test_answers_that_are_not_ours_are_still_errors() -> None:
    for body in (None, [], "nginx says no", {"error": "text"}, {"error": {"code": "from_the_future"}}):
        assert isinstance(errors.error_from_json(body), errors.DiamondError)


def test_text_names_field_and_hint() -> None:
    assert str(errors.InvalidInput("is wrong", hint="do x", field="num_nodes")) == "num_nodes: is wrong\n  hint: do x"
