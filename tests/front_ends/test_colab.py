"""pip changes nothing that Colab has: a package that its kernel has imported could only be replaced by a restart."""

from packaging.requirements import Requirement

from tests.front_ends.colab import COLAB
from tests.test_dependencies import PROJECT, normalized

REQUIRED = {normalized(one.name): one for one in map(Requirement, PROJECT["dependencies"])}


def test_colab_has_what_is_required_in_versions_that_will_do():
    """torch too: replacing it takes gigabytes. JupyterLab is added, and nothing uses it there."""
    replaced = [str(one) for name, one in REQUIRED.items() if name in COLAB and not one.specifier.contains(COLAB[name])]
    assert not replaced
    added = set(REQUIRED) - set(COLAB)
    assert added == {"jupyterlab"}, "pip adds these; look up in Colab's list which it has, and write that into colab.py"
