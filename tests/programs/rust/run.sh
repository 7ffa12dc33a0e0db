cd "$(dirname "$0")" && rustc -O -o /workspace/programs-rust main.rs && exec /workspace/programs-rust
