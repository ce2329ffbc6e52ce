/* One row per key of config.json. A row yields the struct field, the reader, the default and the Python attribute.
 *
 *   SIZE   integer from 1 up         REAL   finite number above 0       BOOL   true or false
 *   COUNT  integer from 0 up         REAL0  finite number from 0 up     FIXED  a flag of which only the default runs
 *   NAME   one of the words of `values`, the first being the default
 *
 * KEY(type, name, default, values, report). `report` says whether taking the default is worth telling: REPORTED for keys
 * the family's configuration classes write, SILENT for those whose absence is normal. The defaults are those of the
 * classes, not of any released model. Keys that need more than a row (rope, layer kinds, tying) are in config.c. */
#ifndef QR_CONFIG_KEYS_H
#define QR_CONFIG_KEYS_H

#define QR_TEXT_KEYS(KEY)                                                                                              \
    KEY(SIZE, vocab_size, 248320, "", REPORTED)                                                                        \
    KEY(SIZE, hidden_size, 4096, "", REPORTED)                                                                         \
    KEY(SIZE, intermediate_size, 12288, "", REPORTED)                                                                  \
    KEY(SIZE, num_hidden_layers, 32, "", REPORTED)                                                                     \
    KEY(SIZE, num_attention_heads, 16, "", REPORTED)                                                                   \
    KEY(SIZE, num_key_value_heads, 4, "", REPORTED)                                                                    \
    KEY(SIZE, head_dim, 256, "", REPORTED)                                                                             \
    KEY(NAME, hidden_act, 0, "silu|swish", REPORTED)                                                                   \
    KEY(SIZE, max_position_embeddings, 32768, "", REPORTED)                                                            \
    KEY(REAL, rms_norm_eps, 1e-6, "", REPORTED)                                                                        \
    KEY(REAL0, initializer_range, 0.02, "", REPORTED)                                                                  \
    KEY(BOOL, attention_bias, 0, "", REPORTED)                                                                         \
    KEY(SIZE, linear_conv_kernel_dim, 4, "", REPORTED)                                                                 \
    KEY(SIZE, linear_key_head_dim, 128, "", REPORTED)                                                                  \
    KEY(SIZE, linear_value_head_dim, 128, "", REPORTED)                                                                \
    KEY(SIZE, linear_num_key_heads, 16, "", REPORTED)                                                                  \
    KEY(SIZE, linear_num_value_heads, 32, "", REPORTED)                                                                \
    KEY(FIXED, attn_output_gate, 1, "", SILENT)                                                                        \
    KEY(NAME, output_gate_type, 0, "silu|swish", SILENT)                                                               \
    KEY(NAME, mamba_ssm_dtype, 0, "float32", SILENT)                                                                   \
    KEY(COUNT, mtp_num_hidden_layers, 0, "", SILENT)                                                                   \
    KEY(FIXED, mtp_use_dedicated_embeddings, 0, "", SILENT)

#define QR_VISION_KEYS(KEY)                                                                                            \
    KEY(SIZE, depth, 27, "", REPORTED)                                                                                 \
    KEY(SIZE, hidden_size, 1152, "", REPORTED)                                                                         \
    KEY(NAME, hidden_act, 0, "gelu_pytorch_tanh", REPORTED)                                                            \
    KEY(SIZE, intermediate_size, 4304, "", REPORTED)                                                                   \
    KEY(SIZE, num_heads, 16, "", REPORTED)                                                                             \
    KEY(SIZE, in_channels, 3, "", REPORTED)                                                                            \
    KEY(SIZE, patch_size, 16, "", REPORTED)                                                                            \
    KEY(SIZE, spatial_merge_size, 2, "", REPORTED)                                                                     \
    KEY(SIZE, temporal_patch_size, 2, "", REPORTED)                                                                    \
    KEY(SIZE, out_hidden_size, 3584, "", REPORTED)                                                                     \
    KEY(SIZE, num_position_embeddings, 2304, "", REPORTED)                                                             \
    KEY(REAL0, initializer_range, 0.02, "", REPORTED)

/* Keys of the root of a composite config; a text-only config has none of them. */
#define QR_ROOT_KEYS(KEY)                                                                                              \
    KEY(COUNT, image_token_id, 248056, "", REPORTED)                                                                   \
    KEY(COUNT, video_token_id, 248057, "", REPORTED)                                                                   \
    KEY(COUNT, vision_start_token_id, 248053, "", REPORTED)                                                            \
    KEY(COUNT, vision_end_token_id, 248054, "", REPORTED)                                                              \
    KEY(FIXED, language_model_only, 0, "", SILENT)

/* Book-keeping that transformers and trainers leave in any section and that changes no arithmetic of inference:
 * known, and ignored. Everything that is neither here nor read is listed in qr_config.unknown. */
#define QR_NEUTRAL_KEYS                                                                                                \
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "add_cross_attention",    \
        "attention_dropout", "attn_implementation", "auto_map", "bad_words_ids", "begin_suppress_tokens",              \
        "bos_token_id", "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id",            \
        "diversity_penalty", "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size",                   \
        "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",           \
        "id2label", "is_decoder", "is_encoder_decoder", "keys_to_ignore_at_inference", "label2id", "length_penalty",   \
        "max_length", "min_length", "name_or_path", "no_repeat_ngram_size", "num_beam_groups", "num_beams",            \
        "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "pad_token_id",          \
        "prefix", "problem_type", "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict",        \
        "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",           \
        "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",    \
        "transformers_version", "typical_p", "use_bfloat16", "use_cache"

#endif
