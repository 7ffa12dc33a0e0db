cd "$(dirname "$0")" && javac -d /workspace/classes Programs.java && exec java -cp /workspace/classes Programs
