# SPDX-License-Identifier: MIT
"""The package itself: finding the library, facts, failures, and what a forked child may do."""

import ctypes
import os
import re
import sys

import pytest
from conftest import ROOT

import offstage
from offstage import _lib


def test_every_function_of_the_header_is_bound():
    header = (ROOT / "include" / "offstage.h").read_text()
    code = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    declared = set(re.findall(r"\b(offstage_\w+)\(", code))
    assert declared == set(_lib._FUNCTIONS)


def test_structs_have_the_headers_layout(tmp_path):
    """Each struct's size and each field's offset, as the C compiler has them."""
    structs = {"offstage_options": _lib.Options, "offstage_info": _lib.Info, "offstage_node_info": _lib.NodeInfo,
               "offstage_feature": _lib.Feature, "offstage_stats": _lib.Stats,
               "offstage_buffer_options": _lib.BufferOptions, "offstage_buffer_info": _lib.BufferInfo,
               "offstage_device_options": _lib.DeviceOptions, "offstage_group": _lib.Group, "offstage_adam": _lib.Adam,
               "offstage_tensor": _lib.Tensor, "offstage_optimizer_options": _lib.OptimizerOptions,
               "offstage_optimizer_info": _lib.OptimizerInfo, "offstage_step_options": _lib.StepOptions,
               "offstage_step_result": _lib.StepResult, "offstage_scaler": _lib.Scaler}
    header = (ROOT / "include" / "offstage.h").read_text()
    assert set(re.findall(r"^struct (\w+) \{", header, flags=re.M)) == set(structs)
    lines = []
    for name, struct in structs.items():
        lines.append(f"_Static_assert(sizeof(struct {name}) == {ctypes.sizeof(struct)}, \"{name}\");")
        for field, _ in struct._fields_:
            lines.append(f"_Static_assert(offsetof(struct {name}, {field}) == {getattr(struct, field).offset}, "
                         f"\"{name}.{field}\");")
    source = tmp_path / "layout.c"
    source.write_text("#include <offstage.h>\n" + "\n".join(lines) + "\n")
    compiler = os.environ.get("CC", "cc")
    if os.system(f"command -v {compiler} > /dev/null"):
        pytest.skip(f"the C compiler {compiler} is absent")
    assert os.system(f"{compiler} -std=gnu11 -I{ROOT}/include -fsyntax-only {source}") == 0


def test_info_tells_what_was_got():
    info = offstage.info()
    assert info["version"] == offstage.__version__
    assert info["provider"] and info["isa"] in info["isas"].split()
    assert info["threads"] >= 1 and info["threads_why"]
    assert info["nodes"][0]["total"] > 0
    assert isinstance(info["features"], dict)


def test_a_failure_has_an_errno_and_a_sentence():
    with pytest.raises(offstage.Error) as caught:
        offstage.Context(isa="z80")
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == 2
    assert "z80" in str(caught.value)


def test_words_that_are_no_choice_are_listed():
    with pytest.raises(ValueError, match="'prefer'"):
        offstage.Context(lock="perhaps")


def test_a_closed_context_says_so():
    context = offstage.Context(threads=1)
    buffer = offstage.Buffer(16, context=context)
    context.close()
    buffer.view()[0] = 1
    with pytest.raises(ValueError, match="closed"):
        context.stats()


def test_a_library_that_is_not_there_is_a_sentence(run):
    text = run("import offstage", env={"OFFSTAGE_LIBRARY": "/nowhere/liboffstage.so.0"}, check=False)
    assert "ImportError" in text and "/nowhere/liboffstage.so.0: not there" in text and "make" in text


def test_a_library_of_another_kind_is_a_sentence(run):
    text = run("import offstage", env={"OFFSTAGE_LIBRARY": "libm.so.6"}, check=False)
    assert "ImportError" in text and "has no offstage_" in text


def test_buffers_work_without_torch_and_numpy(run):
    run("""
        import sys
        sys.modules["torch"] = sys.modules["numpy"] = None
        import offstage
        buffer = offstage.Buffer(100)
        buffer.view()[:3] = b"abc"
        assert bytes(buffer.view()[:3]) == b"abc"
        try:
            offstage.AdamW
        except ImportError as error:
            assert "needs PyTorch" in str(error)
        else:
            raise SystemExit("no ImportError")
        assert "AdamW" in dir(offstage)
    """)


def test_importing_the_package_imports_neither_torch_nor_numpy(run):
    run("import sys, offstage; assert 'torch' not in sys.modules and 'numpy' not in sys.modules")


def test_names_that_are_not_there_are_attribute_errors():
    with pytest.raises(AttributeError):
        offstage.SGD


def in_child(call):
    """Runs call in a forked child; its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = call() or 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_has_a_default_context_of_its_own():
    parent = offstage.default_context()
    buffer = offstage.Buffer(4096)

    def child():
        assert offstage.default_context() is not parent
        offstage.Buffer(4096).view()[0] = 1
        try:
            parent.stats()
        except offstage.Error as error:
            assert error.errno == 10  # ECHILD
            return 0
        return 2

    assert in_child(child) == 0
    buffer.view()[0] = 1


def test_a_forked_child_closes_what_it_inherited():
    buffer = offstage.Buffer(4096)
    buffer.view()[0] = 5

    def child():
        nonlocal buffer
        buffer.close()
        return 0

    assert in_child(child) == 0
    assert buffer.view()[0] == 5


def test_the_version_is_the_headers():
    header = (ROOT / "include" / "offstage.h").read_text()
    parts = [re.search(rf"OFFSTAGE_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH")]
    assert offstage.__version__ == ".".join(parts)
    assert sys.modules["offstage"]._lib.lib.offstage_version().decode() == offstage.__version__
