"""The operators that an exported graph may call, by name.

Any process that can write to the folder of exports can write a graph, and torch has operators that read and
create files (`aten.from_file`), show memory that was never written (`aten.empty`), look past the end of a
tensor (`aten.as_strided`) or change the state of the process. So what is allowed is listed, overload by
overload: functions of tensors, those that write to a tensor of the graph in place, and arithmetic on sizes. A
new operator is refused until it is added here; an export says so first.

The list holds what the ready models and layers use, the functional part of torch.nn, and the core operators
that torch decomposes others into. Random numbers are left out, except for dropout, which does nothing in
eval mode.
"""

from __future__ import annotations

ATEN = frozenset(
    """
    __and__.Scalar __and__.Tensor __or__.Scalar __or__.Tensor __xor__.Scalar __xor__.Tensor
    _adaptive_avg_pool2d.default _assert_async.default _assert_async.msg _assert_scalar.default
    _assert_tensor_metadata.default _log_softmax.default _native_batch_norm_legit_no_training.default
    _softmax.default _to_copy.default _unsafe_index.Tensor _unsafe_view.default abs.default
    absolute.default acos.default acosh.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default
    adaptive_max_pool1d.default add.Scalar add.Tensor add_.Scalar add_.Tensor addbmm.default
    addcdiv.default addcmul.default addmm.default addmv.default addr.default adjoint.default alias.default
    all.default all.dim all.dims alpha_dropout.default amax.default amin.default aminmax.default
    any.default any.dim any.dims arange.default arange.start arange.start_step arccos.default
    arccosh.default arcsin.default arcsinh.default arctan.default arctan2.default arctanh.default
    argmax.default argmin.default argsort.default argsort.stable asin.default asinh.default atan.default
    atan2.default atanh.default atleast_1d.Sequence atleast_1d.default atleast_2d.Sequence
    atleast_2d.default atleast_3d.Sequence atleast_3d.default avg_pool1d.default avg_pool2d.default
    avg_pool3d.default baddbmm.default batch_norm.default bilinear.default binary_cross_entropy.default
    binary_cross_entropy_with_logits.default bitwise_and.Scalar bitwise_and.Scalar_Tensor
    bitwise_and.Tensor bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor
    bitwise_left_shift.Tensor_Scalar bitwise_not.default bitwise_or.Scalar bitwise_or.Scalar_Tensor
    bitwise_or.Tensor bitwise_right_shift.Scalar_Tensor bitwise_right_shift.Tensor
    bitwise_right_shift.Tensor_Scalar bitwise_xor.Scalar bitwise_xor.Scalar_Tensor bitwise_xor.Tensor
    bmm.default broadcast_tensors.default broadcast_to.default bucketize.Scalar bucketize.Tensor
    cat.default cdist.default ceil.default celu.default celu_.default chain_matmul.default chunk.default
    clamp.Tensor clamp.default clamp_.default clamp_max.Tensor clamp_max.default clamp_max_.default
    clamp_min.Tensor clamp_min.default clamp_min_.default clip.Tensor clip.default clone.default
    column_stack.default concat.default concatenate.default constant_pad_nd.default contiguous.default
    conv1d.default conv1d.padding conv2d.default conv2d.padding conv3d.default conv3d.padding
    conv_transpose1d.default conv_transpose2d.input convolution.default copy.default copy_.default
    copysign.Scalar copysign.Tensor cos.default cosh.default cosine_embedding_loss.default
    cosine_similarity.default cross.default cross_entropy_loss.default cummax.default cummin.default
    cumprod.default cumsum.default deg2rad.default detach.default detach_.default diag.default
    diag_embed.default diagflat.default diagonal.default diff.default digamma.default dist.default
    div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode div_.Scalar div_.Tensor divide.Scalar
    divide.Scalar_mode divide.Tensor divide.Tensor_mode dot.default dropout.default dropout_.default
    dsplit.array dsplit.int dstack.default einsum.default einsum.sublist elu.default elu_.default
    embedding.default eq.Scalar eq.Tensor erf.default erfc.default erfinv.default exp.default exp2.default
    exp_.default expand.default expand_as.default expm1.default eye.default eye.m feature_dropout.default
    fill.Scalar fill.Tensor fill_.Scalar fill_.Tensor fix.default flatten.using_ints flip.default
    fliplr.default flipud.default float_power.Scalar float_power.Tensor_Scalar float_power.Tensor_Tensor
    floor.default floor_divide.Scalar floor_divide.default fmax.default fmin.default fmod.Scalar
    fmod.Tensor frac.default frobenius_norm.dim full.default full_like.default gather.default ge.Scalar
    ge.Tensor gelu.default gelu_.default ger.default glu.default greater.Scalar greater.Tensor
    group_norm.default gru.input gru_cell.default gt.Scalar gt.Tensor hardshrink.default
    hardsigmoid.default hardsigmoid_.default hardswish.default hardswish_.default hardtanh.default
    hardtanh_.default hinge_embedding_loss.default hsplit.array hsplit.int hstack.default
    huber_loss.default hypot.default index.Tensor index_add.default index_add_.default index_copy.default
    index_fill.int_Scalar index_fill.int_Tensor index_put.default index_put_.default index_reduce.default
    index_select.default inner.default instance_norm.default isclose.default isfinite.default
    isin.Scalar_Tensor isin.Tensor_Scalar isin.Tensor_Tensor isinf.default isnan.default isneginf.default
    isposinf.default isreal.default kl_div.default kron.default kthvalue.default l1_loss.default
    layer_norm.default le.Scalar le.Tensor leaky_relu.default leaky_relu_.default lerp.Scalar lerp.Tensor
    less.Scalar less.Tensor lgamma.default lift_fresh_copy.default linalg_cross.default
    linalg_matmul.default linalg_multi_dot.default linalg_norm.default linalg_vecdot.default
    linalg_vector_norm.default linear.default linspace.Scalar_Tensor linspace.Tensor_Scalar
    linspace.Tensor_Tensor linspace.default log.default log10.default log1p.default log2.default
    log_.default log_sigmoid.default log_sigmoid_forward.default log_softmax.int logaddexp.default
    logaddexp2.default logcumsumexp.default logical_and.default logical_not.default logical_or.default
    logical_xor.default logit.default logsumexp.default lstm.input lstm_cell.default lt.Scalar lt.Tensor
    mH.a mH.default mT.a mT.default margin_ranking_loss.default masked_fill.Scalar masked_fill.Tensor
    masked_fill_.Scalar masked_fill_.Tensor masked_scatter.default matmul.default max.default max.dim
    max.other max_pool1d.default max_pool1d_with_indices.default max_pool2d.default
    max_pool2d_with_indices.default max_pool3d_with_indices.default maximum.default mean.default mean.dim
    median.default median.dim meshgrid.default meshgrid.indexing min.default min.dim min.other
    minimum.default mish.default mish_.default mm.default mode.default moveaxis.int moveaxis.intlist
    movedim.int movedim.intlist mse_loss.default msort.default mul.Scalar mul.Tensor mul_.Scalar
    mul_.Tensor multi_margin_loss.default multiply.Scalar multiply.Tensor mv.default nan_to_num.default
    nanmean.default nansum.default narrow.Tensor narrow.default native_batch_norm.default
    native_group_norm.default native_layer_norm.default ne.Scalar ne.Tensor neg.default neg_.default
    negative.default new_full.default new_ones.default new_zeros.default nll_loss.default
    nll_loss2d.default nll_loss2d_forward.default nll_loss_forward.default nll_loss_nd.default
    nonzero_static.default norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype
    numpy_T.default one_hot.default ones.default ones_like.default outer.default pad.default
    pad_sequence.default pairwise_distance.default permute.default poisson_nll_loss.default
    positive.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow_.Scalar prelu.default prod.default
    prod.dim_int quantile.default quantile.scalar rad2deg.default ravel.default reciprocal.default
    reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default relu.default relu6.default
    relu6_.default relu_.default remainder.Scalar remainder.Scalar_Tensor remainder.Tensor repeat.default
    repeat_interleave.Tensor repeat_interleave.self_Tensor repeat_interleave.self_int
    replication_pad1d.default replication_pad2d.default replication_pad3d.default reshape.default
    reshape_as.default rms_norm.default rnn_relu.input rnn_tanh.input roll.default round.decimals
    round.default row_stack.default rsqrt.default rsub.Scalar rsub.Tensor scalar_tensor.default
    scaled_dot_product_attention.default scatter.reduce scatter.src scatter.value scatter_.src
    scatter_.value scatter_add.default scatter_add_.default scatter_reduce.two searchsorted.Scalar
    searchsorted.Tensor select.int select_scatter.default selu.default selu_.default sgn.default
    sigmoid.default sigmoid_.default sign.default signbit.default silu.default silu_.default sin.default
    sinh.default slice.Tensor slice_scatter.default smooth_l1_loss.default soft_margin_loss.default
    softmax.int softplus.default softshrink.default sort.default sort.stable special_entr.default
    special_erf.default special_expit.default special_expm1.default special_log1p.default
    special_logit.default special_logsumexp.default special_xlogy.default split.Tensor split.default
    split.sizes split_with_sizes.default sqrt.default sqrt_.default square.default squeeze.default
    squeeze.dim squeeze.dims squeeze_.dim stack.default std.correction std.default std.dim
    std_mean.correction std_mean.default std_mean.dim sub.Scalar sub.Tensor sub_.Scalar sub_.Tensor
    subtract.Scalar subtract.Tensor sum.default sum.dim_IntList sum_to_size.default swapaxes.default
    swapdims.default sym_constrain_range.default sym_constrain_range_for_size.default sym_numel.default
    sym_size.int sym_storage_offset.default sym_stride.int t.default take.default take_along_dim.default
    tan.default tanh.default tanh_.default tensor_split.indices tensor_split.sections
    tensor_split.tensor_indices_or_sections tensordot.default threshold.default tile.default to.device
    to.dtype to.dtype_layout to.other to.prim_Device to.prim_dtype to.prim_other topk.default
    trace.default transpose.int tril.default tril_indices.default triplet_margin_loss.default triu.default
    triu_indices.default true_divide.Scalar true_divide.Tensor trunc.default type_as.default unbind.int
    unflatten.int unfold.default unsafe_chunk.default unsafe_split.Tensor unsafe_split_with_sizes.default
    unsqueeze.default unsqueeze_.default var.correction var.default var.dim var_mean.correction
    var_mean.default var_mean.dim vdot.default view.default view.dtype view_as.default vsplit.array
    vsplit.int vstack.default where.Scalar where.ScalarOther where.ScalarSelf where.self xlogy.Tensor
    zero.default zero_.default zeros.default zeros_like.default
    """.split()  # noqa: SIM905
)
"""Overloads of torch.ops.aten."""
PRIMS = frozenset(("convert_element_type.default", "view_of.default"))
"""Overloads of torch.ops.prims; torch.export itself writes none."""
PYTHON = frozenset(
    (
        *(f"_operator.{name}" for name in ("add", "sub", "mul", "floordiv", "mod", "pow", "getitem")),
        *(f"_operator.{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "neg")),
        *(f"_operator.{name}" for name in ("truediv",)),
        *(f"math.{name}" for name in ("ceil", "floor", "trunc")),
        *(f"torch.sym_{name}" for name in ("int", "float", "max", "min", "not", "ite", "sum")),
    )
)
"""Functions of sizes, and what takes one tensor of several."""
OPERATORS = (
    PYTHON | {f"torch.ops.aten.{name}" for name in ATEN} | {f"torch.ops.prims.{name}" for name in PRIMS}
)
"""All of them, as a graph writes them."""
