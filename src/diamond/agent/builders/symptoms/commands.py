"""What is missing where something is compiled, and failures of the recipe's own commands."""

from __future__ import annotations

from diamond.agent.builders.symptoms.symptom import Symptom

_COMPILER_HINT = (
    "add build-essential (Debian, Ubuntu), gcc gcc-c++ make (RHEL, Rocky) or build-base (Alpine) to `system`"
)
_VENV_COMPILER = "load a compiler on the endpoint (module load gcc) before the agent starts, or build with Apptainer"

_SAID_LINES = 6  # above the line that says which command ended: what it said itself

SYMPTOMS: dict[str, Symptom] = {
    # Compiling.
    "no_rust": Symptom(
        patterns=(
            r"can't find rust compiler",
            r"cargo, the rust package manager, is not installed",
            r"rustc\W.*not found",
        ),
        message="a package wants to be compiled, and there is no Rust compiler",
        hint="add rustc and cargo to `system`, or choose a version that comes compiled",
        instead={
            "venv": "choose a version that comes compiled, or build with Apptainer and a Rust compiler in `system`"
        },
    ),
    "no_cmake": Symptom(
        patterns=(
            r"cmake must be installed",
            r"no such file or directory: '(?P<what>cmake|ninja)'",
            r"(?P<what>cmake|ninja)(: command)? not found",
            r"problem with the cmake installation",
        ),
        message="a package wants to be compiled, and there is no CMake",
        hint="add cmake and ninja-build to `system`, or cmake and ninja to `pip`",
        instead={"venv": "add cmake and ninja to `pip`"},
    ),
    "no_python_headers": Symptom(
        patterns=(r"(?P<what>Python\.h): no such file",),
        message="a package wants to be compiled, and Python's own header files are missing",
        hint="add python3-dev (Debian, Ubuntu) or python3-devel (RHEL, Rocky) to `system`, or take a base docker://python",
        instead={"venv": "load a Python that has them (module load python) before the agent starts"},
    ),
    "no_header": Symptom(
        patterns=(
            r"fatal error: (?P<what>\S+\.h\w*): no such file",
            r"cannot find -l(?P<what>\S+)",
            r"package '(?P<what>[^']+)', required by 'virtual:world', not found",
        ),
        message="a package wants to be compiled, and {what} is missing",
        hint="add the development package that has it to `system` (libhdf5-dev for hdf5.h), or choose a version that "
        "comes compiled",
        instead={
            "venv": "load the module that has it before the agent starts, or choose a version that comes compiled"
        },
        after=2,
    ),
    "no_compiler": Symptom(
        patterns=(
            r"no such file or directory: '(?P<what>[\w.-]*(?:gcc|g\+\+|c\+\+|cc|clang|make))'",
            r"command '(?P<what>\S*(?:gcc|g\+\+|c\+\+|cc|clang))' failed: no such file",
            r"(?P<what>gcc|g\+\+|c\+\+|cc|make|nvcc|gfortran)(: command)? not found",
            r"cannot execute [`']?(?P<what>cc1\w*)",
            r"no acceptable c compiler found",
            r"unknown compiler\(s\): .*",
            r"no cmake_\w+_compiler could be found",
        ),
        message="a package wants to be compiled, and there is no compiler",
        hint=_COMPILER_HINT,
        instead={"venv": _VENV_COMPILER},
    ),
    "no_git": Symptom(
        patterns=(r"cannot find command '(?P<what>git)'", r"(?P<what>git)(: command)? not found"),
        message="git is needed to fetch a package, and is not there",
        hint="add git to `system`",
        instead={"venv": "load git on the endpoint before the agent starts"},
    ),
    "build_dependency": Symptom(
        patterns=(r"ModuleNotFoundError: No module named '(?P<what>[^']+)'",),
        message="a package needs {what} while it is being built, and does not say so itself",
        hint="list {what} under `pip`, and install the package in `build`: pip install --no-build-isolation PACKAGE",
        stages=("pip",),
        after=1,
    ),
    "wheel_failed": Symptom(
        patterns=(
            r"failed building wheel for (?P<what>\S+)",
            r"could not build wheels for (?P<what>[^\s,]+)",
            r"failed to build '?(?P<what>[^\s']+)'?",
            r"(metadata-generation-failed|subprocess-exited-with-error|legacy-install-failure)",
        ),
        message="a package comes as source and could not be compiled: {what}",
        hint="choose a version that comes compiled for this Python, or add what it needs to `system`",
        stages=("pip", "conda", "commands"),
    ),
    # The user's own commands.
    "syntax_error": Symptom(
        patterns=(r"line (?P<line>\d+): (syntax error.*|unexpected EOF.*)", r"syntax error: .*"),
        message="the shell cannot read the commands",
        hint="a quote, bracket or heredoc is not closed",
        stages=("commands", "test"),
        after=1,
    ),
    "command_not_found": Symptom(
        patterns=(r"(?:^|: )(?P<what>[^\s:]+): (?:command )?not found$",),
        message="there is no program {what} in the image",
        hint="add the package that has it to `system` or `pip`",
        instead={"venv": "load the module that has it before the agent starts, or install it with `pip`"},
        stages=("commands", "test"),
    ),
    "module_not_found": Symptom(
        patterns=(r"(?:ModuleNotFoundError|ImportError): No module named '?(?P<what>[\w.]+)'?",),
        message="Python finds no module {what} in the image",
        hint="add the package that has it to `pip`; the package's name can differ from the module's",
        stages=("test", "commands"),
    ),
    "library_not_found": Symptom(
        patterns=(
            r"(?:ImportError|OSError): (?P<what>\S+?): cannot open shared object file",
            r"error while loading shared libraries: (?P<what>\S+?):",
        ),
        message="the system library {what} is missing in the image",
        hint="add the package that has it to `system` (libgl1 for libGL.so.1, libglib2.0-0 for libgthread); those of "
        "a GPU driver (libcuda) are there only on nodes with GPUs",
        instead={"venv": "load the module that has it before the agent starts"},
        stages=("test", "commands"),
    ),
    "no_gpu": Symptom(
        patterns=(
            r"found no nvidia driver",
            r"no cuda gpus are available",
            r"torch not compiled with cuda enabled",
            r"no (cuda-capable|hip-capable) device",
            r"cuda driver version is insufficient",
            r"cuda(_error_no_device|ErrorNoDevice)",
        ),
        message="the commands want a GPU, and the build has none",
        hint="have `test` only import things: login nodes have no GPUs; or build in a batch job that asks for one",
        stages=("test", "commands"),
    ),
    "file_not_found": Symptom(
        patterns=(
            # Right before the line that ended: earlier ones may have been meant to fail.
            r"cannot \w+ '(?P<what>[^'\n]+)'[^\n]*: no such file or directory\ndiamond: (build|test) line .*",
            r"^[^\n]*?(?P<what>[^\s:'\"]+)['\"]?: no such file or directory\ndiamond: (build|test) line .*",
        ),
        message="a command wants {what}, and there is no such file in the image",
        hint="list it under `files`: of your own files only those are in the image, each at the path given there",
        instead={
            "venv": "list it under `files`: of your own files only those are in the image, each at its path below "
            "$DIAMOND_IMAGE_ROOT"
        },
        stages=("commands", "test"),
        after=1,
        before=_SAID_LINES,
    ),
    "test_failed": Symptom(
        patterns=(r"^diamond: test line .*",),
        message="the validation command did not succeed",
        hint="a recipe of which only `test` changes is tried again in seconds: every layer is kept",
        stages=("test",),
        before=_SAID_LINES,
    ),
    "command_failed": Symptom(
        patterns=(r"^diamond: build line .*",),
        message="a command of the recipe failed",
        hint="what it said stands above that line; all stages before it are kept, so a corrected recipe goes on there",
        stages=("commands",),
        before=_SAID_LINES,
    ),
}
