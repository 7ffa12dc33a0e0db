exec python3 "$(dirname "$0")/system.py"
