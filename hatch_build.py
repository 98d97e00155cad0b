"""The build hook: compiles the native library into the package, or says that the reference kernels will be used.

Called by hatchling for wheels and editable installs (pyproject.toml). Never fails an install.
"""

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "runtime/strata_runtime/kernels/native"


class NativeBuildHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        specification = importlib.util.spec_from_file_location("native_build", Path(self.root) / FOLDER / "build.py")
        assert specification is not None
        assert specification.loader is not None
        native = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(native)
        try:
            library = native.build()
        except native.BuildError as error:
            self.app.display_warning(f"strata: no native kernels, the reference in torch is used: {error}")
            return
        if version == "editable":  # imported from the sources' own folder
            return
        build_data["force_include"][str(library)] = f"strata_runtime/kernels/native/{library.name}"
        build_data["pure_python"] = False
        # Plain C behind ctypes: any Python of this platform.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
