-- Snapshots: freezes dataprep's state while it is copied, and restores a run to such a copy.
-- reads and writes: run, tickets, headers, claims, attempts, expiries, outstanding, requeued, ledger, deadletter, reissue
-- A copy is read by plain commands, in pieces that keep the server responsive. It is of one instant because the leader's
-- functions are rejected meanwhile, and `snapshot_begin` reads at once what generators and people may still change.

-- args: trainer fence, token, lease ms. Pauses the leader until `snapshot_end`, or for the length of the lease.
-- Returns {run, ledger, outstanding, requeued, last dead letter, 1 if an evaluation round is open}; the first two are field,
-- value, …
register_trainer('snapshot_begin', function(prefix, args)
  local run = redis.call('HGETALL', prefix .. ':run')
  redis.call('HSET', prefix .. ':run', 'frozen_by', args[2], 'frozen_until_ms', now_ms() + tonumber(args[3]))
  local last = redis.call('XREVRANGE', prefix .. ':deadletter', '+', '-', 'COUNT', 1)[1]
  return {
    run, redis.call('HGETALL', prefix .. ':ledger'), redis.call('ZRANGE', prefix .. ':outstanding', 0, -1, 'WITHSCORES'),
    redis.call('ZRANGE', prefix .. ':requeued', 0, -1), last and last[1] or '',
    redis.call('EXISTS', prefix .. ':eval:round'),
  }
end)

-- args: trainer fence, token, lease ms. Pauses the leader for longer. Returns 0 if the lease had expired: what was copied since
-- may be inconsistent.
register_trainer('snapshot_hold', function(prefix, args)
  local held = redis.call('HMGET', prefix .. ':run', 'frozen_by', 'frozen_until_ms')
  if held[1] ~= args[2] or tonumber(held[2]) <= now_ms() then return 0 end
  redis.call('HSET', prefix .. ':run', 'frozen_until_ms', now_ms() + tonumber(args[3]))
  return 1
end)

-- args: trainer fence, token. Resumes the leader. Returns 0 under the same condition as `snapshot_hold`.
register_trainer('snapshot_end', function(prefix, args)
  local held = redis.call('HMGET', prefix .. ':run', 'frozen_by', 'frozen_until_ms')
  if held[1] ~= args[2] then return 0 end
  redis.call('HDEL', prefix .. ':run', 'frozen_by', 'frozen_until_ms')
  notify(prefix, 'control')
  return tonumber(held[2]) > now_ms() and 1 or 0
end)

-- args: trainer fence, step. From here to `restore_end` nobody leads, nobody claims, and earlier claims are void; the next
-- trainer starts an interrupted restore again. The new incarnation is a time, so that it is also new to a server that was
-- replaced by an empty one.
register_trainer('restore_begin', function(prefix, args)
  local run = prefix .. ':run'
  redis.call('HDEL', run, 'leader', 'leader_until_ms', 'leader_fence', 'frozen_by', 'frozen_until_ms', 'published_by')
  redis.call('HSET', run, 'restoring', args[2], 'published_version', -1)
  for stream, group in pairs({[':tickets'] = 'generators', [':headers'] = 'dataprep'}) do
    redis.call('XGROUP', 'DESTROY', prefix .. stream, group)
    redis.call('XTRIM', prefix .. stream, 'MAXLEN', 0)
    redis.call('XGROUP', 'CREATE', prefix .. stream, group, '$', 'MKSTREAM')
  end
  redis.call('UNLINK', prefix .. ':claims', prefix .. ':attempts', prefix .. ':expiries')
  for _, part in ipairs(EVALUATION_PARTS) do
    redis.call('UNLINK', prefix .. ':eval:' .. part)
  end
  redis.call('HSET', run, 'incarnation', math.max(number(prefix, 'incarnation') + 1, math.floor(now_ms() / 1000)))
  notify(prefix, 'control')
  return 1
end)

-- Return nil if this trainer is restoring this step, otherwise the error to return.
local function not_restoring(prefix, fence, step)
  local refusal = fenced(prefix, 'trainer_fence', fence)
  if refusal then return refusal end
  if redis.call('HGET', prefix .. ':run', 'restoring') ~= step then return redis.error_reply('OUTOFORDER no restore to step ' .. step) end
end

-- args: trainer fence, step, then of each command its number of words, and its words. Between `restore_begin` and `restore_end`
-- everything is written through here, so that a trainer that hung in a restore writes nothing into the run of its successor.
register('restore_write', function(prefix, args)
  local refusal = not_restoring(prefix, args[1], args[2])
  if refusal then return refusal end
  local at = 3
  while at <= #args do
    local words = tonumber(args[at])
    redis.call(unpack(args, at + 1, at + words))
    at = at + 1 + words
  end
  return 1
end, true)

-- args: trainer fence, step, then fields and values of the run's hash. Everything else is in place: the run resumes after `step`.
register('restore_end', function(prefix, args)
  local refusal = not_restoring(prefix, args[1], args[2])
  if refusal then return refusal end
  local run = prefix .. ':run'
  redis.call('HSET', run, unpack(args, 3))
  redis.call('HDEL', run, 'restoring', 'checkpoint_failed', 'evaluation_abandoned')
  if redis.call('HGET', run, 'restore') == args[2] then redis.call('HDEL', run, 'restore') end
  notify(prefix, 'control')
  notify(prefix, 'slots')
  return 1
end, true)
