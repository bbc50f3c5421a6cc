"""pip changes nothing that Colab has: a package that its kernel has imported could only be replaced by a restart.

What it had when it was last looked up: googlecolab/backend-info@a724079 (19 August 2026, Python 3.13),
pip-freeze.gpu.txt. Kaggle's image is built from one of 14 May, with torch 2.10: Kaggle/docker-python@78aaa43."""

from packaging.requirements import Requirement

from tests.test_dependencies import PROJECT, normalized

# Of what fsdp_lab requires; jupyterlab is the one that Colab has not.
COLAB = {"anywidget": "0.9.21", "bokeh": "3.8.2", "cloudpickle": "3.1.2", "datasets": "4.0.0", "filelock": "3.32.3",
         "huggingface-hub": "1.27.0", "ipykernel": "6.17.1", "ipyparallel": "8.8.0", "ipython": "7.34.0",
         "ipywidgets": "7.7.1", "jinja2": "3.1.6", "jupyter-client": "7.4.9", "jupyter-core": "5.9.1", "numpy": "2.1.3",
         "nvidia-ml-py": "13.610.43", "packaging": "26.3", "pillow": "11.3.0", "platformdirs": "4.11.3",
         "psutil": "5.9.5", "pyarrow": "18.1.0", "pyyaml": "6.0.3", "pyzmq": "26.2.1", "rich": "13.9.4",
         "safetensors": "0.8.0", "torch": "2.11.0", "traitlets": "5.7.1", "transformers": "5.15.0"}  # fmt: skip

# What a kernel and the ranks are made of, and what these old versions need that newer ones do not.
KERNEL_PACKAGES = (
    "ipykernel", "ipython", "ipywidgets", "traitlets", "jupyter-client", "ipyparallel", "anywidget", "bokeh", "psutil",
    "pyzmq", "backcall", "pickleshare", "ipython-genutils", "entrypoints", "setuptools",
)  # fmt: skip

REQUIRED = {normalized(one.name): one for one in map(Requirement, PROJECT["dependencies"])}


def test_colab_has_what_is_required_in_versions_that_will_do():
    """torch too: replacing it takes gigabytes. JupyterLab is added, and nothing uses it there."""
    replaced = [str(one) for name, one in REQUIRED.items() if name in COLAB and not one.specifier.contains(COLAB[name])]
    assert not replaced
    added = set(REQUIRED) - set(COLAB)
    assert added == {"jupyterlab"}, "pip adds these; look up in Colab's list which it has, and write that above"
