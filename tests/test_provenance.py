"""The packages whose code a function, a class or an object runs, however it was wrapped."""

import functools
import types
from json import JSONDecoder, JSONEncoder

import pytest
import wrapt

from fastgen.provenance import comes_with, packages_of

OURS = __name__.partition(".")[0]
METHOD = JSONDecoder.decode


class Wrapper:
    """An object that pretends to be the function that it wraps."""

    def __init__(self) -> None:
        functools.update_wrapper(self, METHOD)

    def __call__(self, *args: object) -> object:
        return METHOD(*args)


WRAPPED = {
    "functools.wraps": (functools.wraps(METHOD)(lambda *args: METHOD(*args)), {OURS, "json"}),
    "functools.partial": (functools.partial(METHOD), {"functools", "json"}),
    "functools.partialmethod": (functools.partialmethod(METHOD), {"functools", "json"}),
    "functools.cached_property": (functools.cached_property(METHOD), {"functools", "json"}),
    "property": (property(METHOD), {"builtins", "json"}),
    "functools.cache": (functools.cache(METHOD), {"functools", "json"}),
    "another function": (lambda *args: METHOD(*args), {OURS}),
    "an object": (Wrapper(), {OURS, "json"}),
    "wrapt": (wrapt.FunctionWrapper(METHOD, print), {wrapt.FunctionWrapper.__module__, "json"}),
}


@pytest.mark.parametrize(("method", "packages"), WRAPPED.values(), ids=WRAPPED.keys())
def test_wrappers_of_a_method_are_seen(method, packages):
    assert packages_of(method) == packages and not comes_with(method, JSONDecoder)


@pytest.mark.parametrize("method", [METHOD, JSONDecoder().decode, types.MethodType(METHOD, object())])
def test_a_method_comes_with_its_class_bound_or_not(method):
    assert packages_of(method) == {"json"} and comes_with(method, JSONDecoder)


def test_a_method_of_another_module_comes_with_another_class():
    assert packages_of(JSONEncoder.encode) == {"json"} and not comes_with(JSONEncoder.encode, JSONDecoder)


def test_classes_builtins_and_none_have_their_packages():
    assert [packages_of(code) for code in (JSONDecoder, Wrapper, len, None)] == [{"json"}, {OURS}, {"builtins"}, set()]
    assert not comes_with(None, JSONDecoder)
