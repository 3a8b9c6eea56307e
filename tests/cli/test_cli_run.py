"""``penstock run`` is ``python``: what scripts see, and how they end. None of these needs torch."""

import json
import os
import signal
import sys
import textwrap
import zipfile

import pytest
from cli_processes import NOTICE, PENSTOCK, End, both, end, start, start_plain, start_under

from penstock import ConfigError
from penstock.cli import run

SCRIPTS = {
    "sees what it would see": """
        import os, sys
        print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__, __cached__)
        print(sorted(globals()), type(__builtins__), type(__loader__), __loader__.name)
        print(__loader__.path, sys.modules["__main__"].__dict__ is globals(), os.getcwd())
        x: int = 1
        print(__annotations__, "numpy" in sys.modules, "torch" in sys.modules)
        """,
    "inherits no __future__ of ours": """
        def f(x: 1 + 1): ...
        print(f.__annotations__)
        """,
    "a chain of exceptions": """
        import sys
        def f(x):
            return 1 / x
        print("before")
        try:
            f(0)
        except ZeroDivisionError as error:
            failure = ValueError("no\\nsecond line")
            failure.add_note("a note")
            raise failure from error
        """,
    "a group of exceptions": """
        raise ExceptionGroup("several", [ValueError(1), OSError(2, "x")])
        """,
    "an error of our own tree, not ours to report": """
        import penstock
        raise penstock.ConfigError("the script's own")
        """,
    "does not compile": "print('never')\nx = = 1\n",
    "exits with a number": "import sys; sys.exit(3)",
    "exits with a message": "import sys; sys.exit('gone')",
    "exits with nothing": "raise SystemExit",
    "exits at once": "import os; print('x', flush=True); os._exit(7)",
    "has its own excepthook": """
        import sys, traceback
        def hook(kind, error, tb):
            print("hook:", kind, error, error.__traceback__ is tb, file=sys.stderr)
            traceback.print_tb(tb)
        sys.excepthook = hook
        raise KeyError("x")
        """,
    "deletes the excepthook": """
        import sys
        del sys.excepthook
        raise SystemExit(4)
        """,
    "is interrupted": """
        import atexit
        atexit.register(print, "bye")
        raise KeyboardInterrupt
        """,
    "is terminated": """
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
        """,
    "has handlers and a thread that goes on": """
        import atexit, sys, threading
        atexit.register(lambda: print("first registered", file=sys.stderr))
        atexit.register(lambda: print("second registered", file=sys.stderr))
        atexit.register(lambda: 1 / 0)
        def work():
            threading.main_thread().join()
            print("thread is done", file=sys.stderr)
        threading.Thread(target=work).start()
        print("main is done", file=sys.stderr)
        """,
    "forks, and the child reaches the end too": """
        import os, sys
        print("twice", file=sys.stderr, flush=True)
        if os.fork():
            os.wait()
        """,
    "pickles its own class": """
        import pickle
        class Box:
            pass
        print(type(pickle.loads(pickle.dumps(Box()))) is Box, Box)
        """,
    "has workers, spawned and forked": """
        import multiprocessing, sys
        class Box:
            def __init__(self, value):
                self.value = value
        def work(box):
            return Box(box.value * 2)
        if __name__ == "__main__":
            for method in ("spawn", "fork"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, [box.value for box in pool.map(work, [Box(1), Box("a")])])
                    pool.close()
                    pool.join()
        else:
            print(__name__, sys.argv, flush=True)
        """,
}


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_ends_as_it_would(tmp_path, text):
    write(tmp_path, "folder/script.py", text)
    plain, under = both(tmp_path, "./folder/script.py", "--json", "-x", "", "a b", "--", "-m")
    assert under == plain


@pytest.mark.parametrize("entry", ["command", "module"])
def test_a_module_ends_as_it_would_from_either_entry(tmp_path, entry):
    write(tmp_path, "package/__init__.py", "print('package')")
    write(
        tmp_path,
        "package/part.py",
        """
        import sys
        from . import __name__ as parent
        print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__.name, parent)
        raise (KeyboardInterrupt if sys.argv[1:] else ValueError)("from the module")
        """,
    )
    plain, under = both(tmp_path, "-m", "package.part", entry=entry)
    assert under == plain
    assert plain.code == 1
    plain, under = both(tmp_path, "-m", "package.part", "--config", entry=entry)
    assert under == plain
    assert plain.code == -signal.SIGINT


def test_what_can_be_run_besides_scripts_and_modules(tmp_path):
    show = "import sys; print(sys.argv, sys.path[0], __name__, __file__, __package__)\n"
    write(tmp_path, "folder/__main__.py", show)
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/__main__.py", show)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", show)
    (tmp_path / "link.py").symlink_to(tmp_path / "package" / "__main__.py")
    for words in (
        ["folder", "a"],
        ["archive.zip"],
        ["-m", "package", "-v"],
        ["-mpackage", "v"],
        ["link.py"],
    ):
        plain, under = both(tmp_path, *words)
        assert under == plain
        assert plain.code == 0


def test_what_is_not_there_is_refused_in_the_interpreters_words(tmp_path):
    (tmp_path / "empty").mkdir()
    for words in (["none.py"], ["no/../none.py", "x"], ["empty"], ["-m", "no_such_module"]):
        plain, under = both(tmp_path, *words)
        assert under == plain
        assert plain.code != 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_script_is_refused_in_the_interpreters_words(tmp_path):
    write(tmp_path, "script.py", "").chmod(0)
    plain, under = both(tmp_path, "script.py")
    assert under == plain


def test_a_script_can_be_run_without_unsafe_paths(tmp_path):
    write(tmp_path, "script.py", "import sys; print(tuple(sys.path))")
    plain, under = both(tmp_path, "script.py", PYTHONSAFEPATH="1")
    assert under == plain
    assert str(tmp_path) not in plain.out


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_from_outside_does_what_it_would(tmp_path, number):
    text = """
        import threading, time
        threading.Timer(0.2, print, ["up"], {"flush": True}).start()
        time.sleep(60)
        """
    write(tmp_path, "script.py", text)
    ends = []
    for begin in (start_plain, start_under):
        process = begin(tmp_path, "script.py")
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        ends.append(end(process))
    plain, under = ends
    assert plain.code == under.code == -number
    # what Python lives to see, it tells about; SIGTERM is not among it
    assert under.err == plain.err + (NOTICE if number == signal.SIGINT else "")


def test_json_is_all_there_is_on_standard_output(tmp_path):
    text = "import os, sys; print('py'); sys.stdout.flush(); os.system('echo child')"
    write(tmp_path, "script.py", text)
    under = end(start_under(tmp_path, "script.py", "7", options=["--json"]))
    expected = (
        '{\n  "schema": 1,\n  "command": [\n    "script.py",\n    "7"\n  ],\n  "summary": null\n}\n'
    )
    assert (under.code, under.out, under.err) == (0, expected, "py\nchild\n")


def test_the_command_loads_neither_torch_nor_numpy(tmp_path):
    code = (
        "import penstock.cli.run, sys; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    assert end(start_plain(tmp_path, "-c", code)).out == "[]\n"


def test_recomputing_is_asked_for_by_an_option_or_by_the_file(tmp_path):
    (tmp_path / "offload.toml").write_text("[offload]\nrecompute = true\n")
    by_file = ("--config", str(tmp_path / "offload.toml"))
    for options, wanted in (((), False), (("--recompute",), True), (by_file, True)):
        parsed = run.parser().parse_args([*options, "script.py"])
        assert run._config(parsed).recompute is wanted


@pytest.mark.parametrize("option", ["--optimizer-memory", "--gradient-memory"])
def test_what_is_for_states_on_flash_is_refused_without_them(tmp_path, option):
    def settings(*words):
        parsed = run.parser().parse_args([option, "0B", *words, "script.py"])
        return run._optimizer_settings(parsed, run._config(parsed))

    with pytest.raises(ConfigError, match=f"{option} needs --optimizer-state flash"):
        settings()
    name = "host_memory" if option == "--optimizer-memory" else "gradient_memory"
    assert settings("--optimizer-state", "flash", "--flash", str(tmp_path))[name] == "0B"


def test_a_file_does_not_get_the_number_of_a_closed_output(tmp_path):
    """Else what writes to standard error would write into it."""
    (tmp_path / "script.py").write_text(
        "import os\n"
        "fd = os.open('out', os.O_CREAT | os.O_WRONLY)\n"
        "os.system('echo of a child >&2')\n"
        "os.write(2, b'a message of C')\n"
        "os.write(fd, b'data %d' % (fd > 2))\n"
    )
    command = [*PENSTOCK["module"], "run", "script.py"]
    closed = end(start(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], tmp_path))
    assert closed == End(0, "", "")
    assert (tmp_path / "out").read_bytes() == b"data 1"
    refused = end(
        start(["sh", "-c", 'exec "$@" >&-', "sh", *command[:-1], "--json", "a.py"], tmp_path)
    )
    assert refused.code == 2


def test_what_a_manager_ends_by_hears_it_also_begun_in_the_background(tmp_path):
    (tmp_path / "script.py").write_text(
        "import signal\n"
        "numbers = signal.SIGINT, signal.SIGTERM\n"
        "print(*(signal.getsignal(each) is signal.SIG_IGN for each in numbers))\n"
        "print(*(each in signal.pthread_sigmask(signal.SIG_BLOCK, []) for each in numbers))\n"
    )
    (tmp_path / "channel").write_bytes(bytes(8192))
    begin = (
        "import os, signal, sys\n"
        "for each in signal.SIGINT, signal.SIGTERM: signal.signal(each, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    for options, deaf in (([], "True True\n"), (["--channel", "channel"], "False False\n")):
        command = [*PENSTOCK["module"], "run", *options, "script.py"]
        ended = end(start([sys.executable, "-c", begin, *command], tmp_path))
        assert (ended.code, ended.out) == (0, deaf * 2)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_beneath_its_log_does_not_end_a_job(tmp_path, unbuffered):
    (tmp_path / "script.py").write_text(
        "import sys\n"
        "for _ in range(100): print('x' * 1000, flush=True)\n"
        "print('to error', file=sys.stderr)\n"
        "open('done', 'w').close()\n"
    )
    (tmp_path / "channel").write_bytes(bytes(8192))
    for options in (["--channel", "channel"], []):
        command = [*PENSTOCK["module"], "run", *options, "script.py"]
        full = ["sh", "-c", 'exec "$@" >/dev/full 2>&1', "sh", *command]
        code = end(start(full, tmp_path, PYTHONUNBUFFERED=unbuffered)).code
        assert (code == 0) == (tmp_path / "done").exists() == bool(options)
        (tmp_path / "done").unlink(missing_ok=True)


def test_one_limit_for_all_memory_is_an_option(tmp_path):
    """A size, or a share of the machine's memory; in the summary, with what the process holds."""
    write(tmp_path, "script.py", "import torch\n")
    for value, source in (("16MiB", "memory=16.00 MiB"), ("50%", "memory='50%': 50% of ")):
        options = ["--memory", value, "--flash", ".", "--flash-capacity", "64MiB", "--json"]
        done = end(start_under(tmp_path, "script.py", options=options))
        assert done.code == 0, done.err
        use = json.loads(done.out)["summary"]["host"]
        assert use["limit_source"].startswith(source)
        assert use["limit_bytes"] == 16 << 20 or use["usable_bytes"] > use["limit_bytes"]
    refused = end(start_under(tmp_path, "script.py", options=["--memory", "most", "--flash", "."]))
    assert refused.code == 2
    assert "memory: 'most' is not a size" in refused.err
    assert "'60%', or 'auto'" in refused.err
