# A large repository: 20 000 files, 500 commits; what people and tools do with one. Prints TAP.
set -u
export GIT_AUTHOR_NAME=A GIT_AUTHOR_EMAIL=a@example.org GIT_COMMITTER_NAME=A GIT_COMMITTER_EMAIL=a@example.org
FILES=${FILES:-20000} COMMITS=${COMMITS:-500}
t() { name=$1; shift; if out=$("$@" 2>&1); then echo "ok - $name"; else echo "not ok - $name"; echo "$out" | tail -5 | sed 's/^/# /'; fi; }
rm -rf /workspace/repo; mkdir -p /workspace/repo; cd /workspace/repo || exit 9
git init -q -b main .
generate() {
  python3 - "$FILES" "$COMMITS" <<'P' | git fast-import --quiet
import sys
files, commits = int(sys.argv[1]), int(sys.argv[2])
out = sys.stdout
per = files // commits
for n in range(commits):
    out.write(f"commit refs/heads/main\nmark :{n + 1}\ncommitter A <a@example.org> {1700000000 + n * 60} +0000\ndata 9\nchange {n % 100:02d}\n")
    if n:
        out.write(f"from :{n}\n")
    for k in range(per):
        number = n * per + k
        text = f"file {number}\n" + "line\n" * (number % 17)
        out.write(f"M 100644 inline d{number % 97}/e{number % 13}/f{number}.txt\ndata {len(text)}\n{text}\n")
    text = "".join(f"line {i} of {n}\n" if i % 50 == n % 50 else f"line {i}\n" for i in range(300))
    out.write(f"M 100644 inline blamed.txt\ndata {len(text)}\n{text}\n")
P
}
t "fast-import of $COMMITS commits" generate
t checkout git reset -q --hard main
t "every file is there" sh -c "[ \$(git ls-files | wc -l) -eq $((FILES / COMMITS * COMMITS + 1)) ]"
t "status is clean" sh -c '[ -z "$(git status --porcelain)" ]'
t blame sh -c '[ $(git blame blamed.txt | wc -l) -eq 300 ]'
t log sh -c "[ \$(git log --oneline -- blamed.txt | wc -l) -eq $COMMITS ]"
t grep git grep -q "file 77$"
side() { git checkout -q -b side main~20 && echo x >new.txt && git add new.txt && git commit -q -m new && echo y >>new.txt && git commit -q -am more && git rebase -q main; }
t rebase side
t "interactive rebase" sh -c 'GIT_SEQUENCE_EDITOR="sed -i 2s/pick/squash/" GIT_EDITOR=true git rebase -q -i main && [ $(git rev-list --count main..side) -eq 1 ]'
t worktree sh -c 'git worktree add -q ../tree main~5 && [ -f ../tree/blamed.txt ] && git worktree remove ../tree'
t stash sh -c 'echo z >>new.txt && git stash -q && git stash pop -q && git checkout -q new.txt'
t merge sh -c 'git checkout -q main && git merge -q --no-ff -m merge side'
bisect() { git bisect start main main~30 >/dev/null && git bisect run sh -c 'exit $(( $(git rev-list --count HEAD) % 2 ))' >/dev/null; git bisect reset >/dev/null 2>&1; }
t bisect bisect
t gc git gc -q
t fsck git fsck --full
t "clone by file" git clone -q --no-local /workspace/repo /workspace/clone
t "clone by hard links" git clone -q /workspace/repo /workspace/clone2
t "fetch and push" sh -c 'cd /workspace/clone && git checkout -q -b more && echo q >q && git add q && git commit -q -m q && git push -q origin more && git fetch -q'
hook() { printf '#!/bin/sh\necho hooked >hooked\n' >.git/hooks/post-commit && chmod +x .git/hooks/post-commit && git commit -q --allow-empty -m hook && [ -f hooked ]; }
t "a hook runs" hook
t archive sh -c 'git archive main | tar -t >/dev/null'
