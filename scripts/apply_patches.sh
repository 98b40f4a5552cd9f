#!/usr/bin/env bash
# Apply patches/series to a released SGLang, or take it back.
#
#   scripts/apply_patches.sh TARGET [--reverse]
#
# TARGET is a site-packages folder or any other folder that holds sglang/. Nothing is written unless
# every patch fits. Files are replaced, never written through hard links.
set -euo pipefail

usage="usage: apply_patches.sh TARGET [--reverse]"
patches="$(cd "$(dirname "${BASH_SOURCE[0]}")/../patches" && pwd -P)"
release=0.5.14

fail() { # what was asked: the rule with its numbers. The way out.
    echo "error: $*" >&2
    exit 1
}

# The release that the tree says it is: its version file, else the last tag of its git history.
found_release() {
    local version=""
    if [[ -f "$target/sglang/_version.py" ]]; then
        version="$(sed -n "s/^__version__ = .*'\(.*\)'$/\1/p" "$target/sglang/_version.py")"
    elif command -v git >/dev/null; then
        version="$(git -C "$target" describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true)"
    fi
    version="${version#v}"
    echo "${version%%+*}" # a fork's build carries a local version, 0.5.14+fork
}

# run_tool check|write forward|backward: feed a patch on stdin to patch(1), else to git.
run_tool() {
    local flags=()
    if command -v patch >/dev/null; then
        [[ "$1" == check ]] && flags+=(--dry-run)
        [[ "$2" == backward ]] && flags+=(-R)
        patch -p1 -d "$target" -f -s -F0 --no-backup-if-mismatch -r - "${flags[@]}"
    else
        [[ "$1" == check ]] && flags+=(--check)
        [[ "$2" == backward ]] && flags+=(-R)
        # Inside another repository git would skip, without a word, files outside of the current
        # folder or apply to its root; so it must not look above TARGET.
        (cd "$target" && env -u GIT_DIR -u GIT_WORK_TREE \
            GIT_CEILING_DIRECTORIES="$(dirname "$target")" git apply -p1 "${flags[@]}")
    fi
}

fits() { run_tool check "$1" <"$patches/$2" >/dev/null 2>&1; } # fits forward|backward PATCH

way=forward back=backward verb=apply state="applied to" target=""
for argument in "$@"; do
    case "$argument" in
    --reverse) way=backward back=forward verb=reverse state="absent from" ;;
    -h | --help) echo "$usage" && exit 0 ;;
    -*) fail "option $argument was given: the only one is --reverse. $usage" ;;
    *)
        [[ -z "$target" ]] || fail "two folders were given: one at a time. $usage"
        target="$argument"
        ;;
    esac
done
[[ -n "$target" ]] || fail "no folder was given: it is the one that holds sglang/. $usage"
[[ -d "$target/sglang/srt" ]] || fail "asked to $verb patches in $target: it holds no sglang/srt." \
    "Name the folder above sglang/, such as site-packages, or python/ of a checkout."
target="$(cd "$target" && pwd -P)"
command -v patch >/dev/null || command -v git >/dev/null ||
    fail "asked to $verb patches: it takes patch or git, and neither is here. Install one of them."
found="$(found_release)"
[[ "$found" == "$release" ]] || fail "asked to $verb patches in $target: they are made for sglang" \
    "$release, and this is ${found:-of unknown version (no sglang/_version.py, no git tag)}." \
    "Use a tree of $release, or the patches of the sglang-dcp made for this one."

mapfile -t series < <(grep -v '^ *\(#\|$\)' "$patches/series")
todo=() misfits=()
for name in "${series[@]}"; do
    if fits "$way" "$name"; then
        todo+=("$patches/$name")
    elif ! fits "$back" "$name"; then
        misfits+=("$name")
    fi
done
((${#misfits[@]} == 0)) || fail "asked to $verb ${#series[@]} patches in $target: the files of" \
    "${misfits[*]} are neither those of sglang $release nor those with these patches. Nothing was" \
    "changed. Restore them (pip install --force-reinstall --no-deps sglang==$release), then retry."
if ((${#todo[@]} == 0)); then
    echo "already $state $target: ${#series[@]} patches"
    exit 0
fi
cat "${todo[@]}" | run_tool write "$way"
echo "$verb: ${#todo[@]} of ${#series[@]} patches, now all $state $target (sglang $release)"
[[ "$way" == backward ]] || echo "this sglang imports sglang_dcp: install it beside it"
