// The functions that Python calls (kernels/native_planes.py): numbers in one array, checked there; a path is chosen here.
#include "product.h"

#include "calls.h"
#include "rows.h"

using namespace strata;

namespace {

struct GroupsCall {
  PlanesCall call;
  int64_t scales, scale_stride, zeros, zero_stride, count, size;
};

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

Matrix tokens_of(const PlanesCall& call) {
  return {pointer<const void>(call.tokens), call.token_rows, call.token_columns, call.token_stride, static_cast<Type>(call.type)};
}

Planes weight_of(const PlanesCall& call) {
  Planes weight{};
  for (int place = 0; place < call.bits; ++place) {
    weight.planes[place] = pointer<const uint8_t>(call.planes[place]);
    weight.stride[place] = call.strides[place];
  }
  weight.table = pointer<const uint8_t>(call.table);
  weight.table_stride_bytes = call.table_stride * item_bytes(static_cast<Type>(call.type));
  weight.rows = call.rows;
  weight.columns = call.columns;
  weight.bits = static_cast<int>(call.bits);
  return weight;
}

// run(tokens, out) for a part of the tokens at a time: what is kept of them stays in the cache, and scratch memory small.
template <class Run>
void in_parts(const PlanesCall& call, const Run& run) {
  constexpr int64_t kTokensAtOnce = 128;
  const int64_t item = item_bytes(static_cast<Type>(call.type));
  for (int64_t first = 0; first < call.token_rows; first += kTokensAtOnce) {
    Matrix part = tokens_of(call);
    part.data = part.row(first);
    part.rows = call.token_rows - first < kTokensAtOnce ? call.token_rows - first : kTokensAtOnce;
    run(part, pointer<uint8_t>(call.out) + first * call.out_stride * item);
  }
}

}  // namespace

// tokens [M, K] x a weight of centroids -> out [M, N].
STRATA_API void strata_planes_linear(const PlanesCall* call) {
  const Planes weight = weight_of(*call);
  const int threads = static_cast<int>(call->threads);
  in_parts(*call, [&](const Matrix& tokens, void* out) {
#if STRATA_X86
    if (tokens.type == Type::bfloat16 && cpu_level() == Level::avx512 && weight.bits >= 2)
      return product_bfloat16_avx512(tokens, weight, static_cast<uint16_t*>(out), call->out_stride, threads);
    if (tokens.type == Type::bfloat16 && cpu_level() >= Level::avx2)
      return product_bfloat16_avx2(tokens, weight, static_cast<uint16_t*>(out), call->out_stride, threads);
#endif
    product_float(tokens, weight, out, call->out_stride, threads);
  });
}

// The same of bfloat16, in the order of strata_dense_linear's additions: decoded as they are met, which many tokens make up for.
STRATA_API void strata_planes_decoded_linear(const PlanesCall* call) {
#if STRATA_X86
  planes_decoded_avx2(*call, weight_of(*call));
#else
  strata_planes_linear(call);
#endif
}

// The same with int8 activations (any4_a8).
STRATA_API void strata_planes_linear_int8(const PlanesCall* call) {
  const Planes weight = weight_of(*call);
  in_parts(*call, [&](const Matrix& tokens, void* out) { product_int8(tokens, weight, out, call->out_stride, static_cast<int>(call->threads)); });
}

// tokens [M, K] x a weight of uniform groups -> out [M, N].
STRATA_API void strata_planes_group_linear(const GroupsCall* all) {
  const PlanesCall& call = all->call;
  const Planes weight = weight_of(call);
  const Groups groups{pointer<const uint16_t>(all->scales), pointer<const uint8_t>(all->zeros), all->scale_stride, all->zero_stride, all->count, all->size};
  in_parts(call, [&](const Matrix& tokens, void* out) {
#if STRATA_X86
    if (tokens.type == Type::bfloat16 && cpu_level() == Level::avx512 && weight.bits >= 2 && groups_bfloat16_avx512_takes(groups))
      return product_groups_bfloat16_avx512(tokens, weight, groups, static_cast<uint16_t*>(out), call.out_stride, static_cast<int>(call.threads));
    if (tokens.type == Type::bfloat16 && cpu_level() >= Level::avx2)
      return product_groups_bfloat16_avx2(tokens, weight, groups, static_cast<uint16_t*>(out), call.out_stride, static_cast<int>(call.threads));
#endif
    product_groups_float(tokens, weight, groups, out, call.out_stride, static_cast<int>(call.threads));
  });
}

// The weight itself, out [N, columns] of the table's type. Tokens are not looked at.
STRATA_API void strata_planes_decode(const PlanesCall* call) {
  const Planes weight = weight_of(*call);
  const Type type = static_cast<Type>(call->type);
  parallel_for(static_cast<int>(call->threads), weight.rows, 16, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    uint8_t* codes = scratch.of<uint8_t>(weight.columns);
    for (int64_t row = begin; row < end; ++row)
      decode_values(weight, row, type, codes, pointer<uint8_t>(call->out) + row * call->out_stride * item_bytes(type));
  });
}
