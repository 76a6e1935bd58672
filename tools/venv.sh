#!/bin/sh
# venv.sh PYTHON FOLDER PROJECT [PACKAGE ...]: make a virtual environment with the project, editable, and
# packages of which only the data is wanted: without their dependencies.
set -eu
python=$1 folder=$2 project=$3
shift 3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "RSV needs Python 3.11 or newer, $python is $("$python" --version): make ... PYTHON=python3.12" >&2
    exit 1
}
rm -rf "$folder"
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$project"
[ $# = 0 ] || "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"
touch "$folder/ready"
