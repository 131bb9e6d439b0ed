#!/bin/sh
# REST and CREST with the models, datastores and lengths of their papers, greedy, in float16: on a GPU of 24 GB, with
# 70 GB of disk and access to bigcode/the-stack-dedup. In a checkout, with the folder DATA of README.md:
#
#     DATA=... sh benchmarks/full_size.sh
#
# The authors' files hold 8 bytes a token: 27 and 12 GB (REST), 924 and 465 MB (CREST).
set -e
code=codellama/CodeLlama-7b-Instruct-hf chat=lmsys/vicuna-7b-v1.5
head -80 "$DATA/spec_bench_questions.jsonl" > mt_bench.jsonl # Spec-Bench's first 80 questions

on_humaneval() {
    hf-refspec bench --prompts "$DATA/HumanEval.jsonl.gz" --model $code --device-map auto --dtype float16 \
        --max-new-tokens 512 --max-draft-tokens 64 --drafters "$@"
}
on_mt_bench() {
    hf-refspec bench --prompts mt_bench.jsonl --model $chat --device-map auto --dtype float16 \
        --max-new-tokens 1024 --max-draft-tokens 64 --drafters "$@"
}
crest() { # STORE OUT M T
    python -c "import sys, hf_refspec as rs; store, out, m, t = sys.argv[1:]
rs.Datastore(store).compact(out, published=True, max_ngram=int(m), ngrams_per_order=int(t))" "$@"
}

build() { # DATASET OPTIONS TOKENIZER MAX_TOKENS OUT
    python -c "import sys, datasets, hf_refspec as rs, transformers; name, options, tok, most, out = sys.argv[1:]
rows = datasets.load_dataset(name, split='train', **eval(options))
rs.Datastore.build(rows, transformers.AutoTokenizer.from_pretrained(tok), out, max_tokens=eval(most))" "$@"
}
stack="{'data_dir': 'data/python', 'streaming': True}"
sharegpt="{'data_files': 'ShareGPT_V4.3_unfiltered_cleaned_split.json'}"

# REST, sections 4.1 and 4.2: 30 of 144 files of The Stack, and all of UltraChat
build bigcode/the-stack-dedup "$stack" $code 3400000000 stack
on_humaneval REST=stack DatastoreDrafts=stack
build stingning/ultrachat "{}" $chat None ultrachat
on_mt_bench REST=ultrachat DatastoreDrafts=ultrachat

# CREST: one file of The Stack with n up to 5, ShareGPT with n up to 4, t of the authors' actual_db_sizes.sh
build bigcode/the-stack-dedup "$stack" $code 115500000 stack-small
for t in 3672 7345 14691 29382 67420 143733 296358 468061 601608 706538; do
    crest stack-small stack-crest-$t 5 $t
    on_humaneval REST=stack-small DatastoreDrafts=stack-crest-$t
done
build Aeala/ShareGPT_Vicuna_unfiltered "$sharegpt" $chat None sharegpt
for t in 4420 8840 17681 37950 86844 184632 380207 600229 771357 905815; do
    crest sharegpt sharegpt-crest-$t 4 $t
    on_mt_bench REST=sharegpt DatastoreDrafts=sharegpt-crest-$t
done

# The answers of Vicuna 7B in REST's repository, without a model
python benchmarks/ablation.py sharegpt --questions mt_bench.jsonl --tokenizer $chat --data \
    "$DATA/baseline-vicuna-7b-v1.5-temperature-0.0-top_p-0.jsonl"
