#!/usr/bin/env bash
# The runs behind the GPU tables, stage by stage; every stage goes on where it stopped.
#
#   bash benchmarks/gpu.sh STAGE DATA [OUTPUT]     STAGE: timing, accuracy, others, text, iteration, scaling
#
# DATA is the folder with cifar-10, mnist and shakespeare. Two slices of one GPU stand for a mismatched pair: the shares
# in PAIR give solo speeds of about 2.2 to 1 on an H200, those in PRODUCTS have right products in half precision without
# being mended (docs/gpu.md). OUTRIDER is the command, where it is not installed.
set -euo pipefail

stage=${1:?which stage} data=${2:?where the data lies} output=${3:-runs/gpu}
read -ra outrider <<<"${OUTRIDER:-outrider}"
pair=${PAIR:-cuda:0%30,cuda:0%10}
products=${PRODUCTS:-cuda:0%25,cuda:0%8}
equal=cuda:0%50,cuda:0%50
ours=nccl-sync,nccl-balanced,nccl-cadence,nccl-async,cpu-sync,cpu-balanced,cpu-cadence,cpu-async
unhurried=nccl-balanced,nccl-cadence,nccl-async,cpu-balanced,cpu-cadence,cpu-async
few=solo-0,nccl-async,cpu-async,nccl-balanced

sweep() {
  "${outrider[@]}" bench sweep --preset full --devices "$pair" --data "$data" --output "$output" \
    --set precision=bf16 --set threads_per_rank=1 --set timeout_s=120 "$@"
}
# By default slices keep the model's own format, for large models can stand still in channels_last there; this one does not.
resnet20() { sweep --set memory_format=channels_last "$@"; }
untimed() { resnet20 --epochs 200 --jobs "${JOBS:-7}" "$@"; }

case $stage in
  timing) # every mode alone on the card, ten epochs after the first, three rounds
    resnet20 --models resnet20 --modes "solo-0,solo-1,independent,ddp,$ours" --epochs 11 --seeds 3
    resnet20 --models resnet20-graph --modes solo-0,graph-sync --epochs 11 --seeds 3
    ;;
  accuracy) # 200 epochs, several runs at a time
    untimed --models resnet20 --modes "solo-0,solo-1,$ours" --seeds 1
    untimed --models resnet20-graph --modes graph-sync --seeds 1
    untimed --models resnet20 --modes "$few" --seeds 3
    ;;
  others) # the other models, five epochs each, several runs at a time
    # A fault on the GPU ends all runs of an MPS daemon: each model has a sweep, and so a daemon, of its own.
    failed=0 pair=$products
    for model in logistic mlp lenet conv-ae char-rnn gpt-nano; do
      sweep --models "$model" --modes "solo-0,solo-1,$ours" --seeds 3 --jobs "${JOBS:-7}" || failed=1
    done
    exit $failed
    ;;
  text) # the two whose speed is in question, each run alone on the card; what they learn is the stage before's
    pair=$products
    sweep --models char-rnn,gpt-nano --modes "solo-0,independent,$unhurried" --epochs 11 --seeds 3
    ;;
  iteration) # torch DDP against sync, eager against captured
    mkdir -p "$output"
    for execution in eager graph; do
      "${outrider[@]}" bench iteration --model resnet50 --devices "$equal" --execution "$execution" \
        --json "$output/iteration_$execution.json"
    done
    ;;
  scaling) # one device, DDP, FSDP2 and the policies, on the mismatched pair and on equal slices
    mkdir -p "$output"
    for devices in "$pair" "$equal"; do
      name=scaling_$([[ $devices == "$equal" ]] && echo equal || echo pair)
      "${outrider[@]}" bench scaling --model resnet34 --devices "$devices" --data "$data" \
        --output "$output/$name" --json "$output/$name.json"
    done
    ;;
  *)
    echo "unknown stage $stage: timing, accuracy, others, text, iteration or scaling" >&2
    exit 2
    ;;
esac
