# A project of Node with its tests: workers, children, watching, HTTP on loopback, streams, crypto. Prints TAP.
cd "$(dirname "$0")" && exec node programs.test.mjs
