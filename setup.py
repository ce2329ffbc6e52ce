"""Builds the one extension, qwenref._C.  Metadata is in pyproject.toml.

QWENREF_SANITIZE=address,undefined   instrument the extension
QWENREF_DEBUG=1                      -O0 -g3, assertions on
QWENREF_WERROR=1                     warnings are errors
"""

import glob
import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# The first module of each row that pkg-config knows is linked; distributions name them differently.
LIBRARIES = {"cJSON": ("libcjson", "cjson"), "CBLAS": ("openblas", "cblas-openblas", "blas-openblas", "cblas", "blas")}
MISSING = """{what} not found: pkg-config knows none of {modules}
    do       install the C libraries and pkg-config, then build again
             apt    sudo apt-get install libcjson-dev libopenblas-dev pkg-config
             dnf    sudo dnf install cjson-devel openblas-devel pkgconf-pkg-config
             brew   brew install cjson openblas pkg-config
             conda  conda install -c conda-forge cjson openblas pkg-config"""
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]
FLAGS += ["-Wall", "-Wextra", "-Wconversion"]


def pkg_config(what):
    """Compiler and linker words for one library."""
    for module in LIBRARIES[what]:
        asks = (f"${{PKG_CONFIG:-pkg-config}} {kind} {module} 2>/dev/null" for kind in ("--cflags", "--libs"))
        asked = [subprocess.getstatusoutput(ask) for ask in asks]
        if not any(status for status, _ in asked):
            return [shlex.split(words) for _, words in asked]
    raise SystemExit(MISSING.format(what=what, modules=", ".join(LIBRARIES[what])))


class Build(build_ext):
    def build_extensions(self):
        compile_some = self.compiler.compile

        def compile_side_by_side(sources, **options):  # each kernel level is a long compilation of its own
            with ThreadPoolExecutor(os.cpu_count()) as workers:
                return [done[0] for done in workers.map(lambda source: compile_some([source], **options), sources)]

        for extension in self.extensions:  # here, not at import: metadata and sdist need no libraries
            for cflags, libs in map(pkg_config, LIBRARIES):
                extension.extra_compile_args += cflags
                extension.extra_link_args += libs
        self.compiler.compile = compile_side_by_side
        super().build_extensions()


sanitize = os.environ.get("QWENREF_SANITIZE")
link = ["-pthread", "-lm"]
if os.environ.get("QWENREF_DEBUG") == "1":
    FLAGS += ["-O0", "-g3", "-UNDEBUG"]
else:
    FLAGS += ["-O1" if sanitize else "-O3"]
if os.environ.get("QWENREF_WERROR") == "1":
    FLAGS += ["-Werror"]
if sanitize:
    link += [f"-fsanitize={sanitize}"]
    FLAGS += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined"]

# The other kernel files are included by the level files: one compilation per instruction level.
SOURCES = ["csrc/kernels/level_*.c", "csrc/kernels/registry.c", "csrc/core/*.c", "csrc/python/*.c"]

setup(
    cmdclass={"build_ext": Build},
    ext_modules=[
        Extension(
            "qwenref._C",
            sources=[path for pattern in SOURCES for path in sorted(glob.glob(pattern))],
            depends=["setup.py", *glob.glob("csrc/**/*.[ch]", recursive=True)],
            include_dirs=["csrc", numpy.get_include()],
            extra_compile_args=FLAGS,
            extra_link_args=link,
        )
    ],
)
