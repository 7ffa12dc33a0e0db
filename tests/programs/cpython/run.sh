# CPython's own test suite. The interpreter is copied beside it, for it looks for its tests in its own library. Prints TAP.
set -e
cd "$(dirname "$0")"
mkdir -p /workspace/py/bin /workspace/py/lib
real=$(python3 -c 'import os, sys; print(os.path.realpath(sys.executable))')
name=$(basename "$real")
cp "$real" /workspace/py/bin/ && ln -sf "$name" /workspace/py/bin/python3
cp -r "/usr/lib/$name" /workspace/py/lib/
cp -r suite/. "/workspace/py/lib/$name/"
ln -s /usr/include /workspace/py/include
unset PYTHONUNBUFFERED
exec /workspace/py/bin/python3 suite.py
