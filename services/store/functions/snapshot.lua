-- Snapshots: freezes dataprep's state while it is copied, and restores a run to such a copy.
-- reads and writes: run, tickets, headers, claims, attempts, expiries, outstanding, requeued, ledger, deadletter, reissue, step:<s>, samples:state
-- A copy is read by plain commands, in pieces that keep the server responsive. It is of one instant because the leader's
-- functions are rejected meanwhile, and `snapshot_begin` reads at once what generators and people may still change.

-- args: trainer fence, token, lease ms. Pauses the leader until `snapshot_end`, or for the length of the lease. Tokens ascend; a
-- call for a snapshot that has ended, or older than the last one, is rejected.
-- Returns {run, ledger, outstanding, requeued, last dead letter, 1 if an evaluation round is open}; the first two are field,
-- value, …
register_trainer('snapshot_begin', {'token', NATURAL, 'lease ms', NATURAL}, function(prefix, args)
  if redis.call('HGET', prefix .. ':run', 'frozen_by') ~= args[2] and overtaken(prefix .. ':run', 'snapshot', args[1], args[2]) then
    return redis.error_reply('OUTOFORDER snapshot ' .. args[2] .. ' has ended')
  end
  local run = redis.call('HGETALL', prefix .. ':run')
  redis.call('HSET', prefix .. ':run', 'frozen_by', args[2], 'frozen_until_ms', tick(prefix) + tonumber(args[3]))
  local letter = redis.call('XREVRANGE', prefix .. ':deadletter', '+', '-', 'COUNT', 1)[1]
  return {
    run, redis.call('HGETALL', prefix .. ':ledger'), redis.call('ZRANGE', prefix .. ':outstanding', 0, -1, 'WITHSCORES'),
    redis.call('ZRANGE', prefix .. ':requeued', 0, -1), letter and letter[1] or '',
    redis.call('EXISTS', prefix .. ':eval:round'),
  }
end)

-- args: trainer fence, token, lease ms. Pauses the leader for longer. Returns 0 if the lease had expired: what was copied since
-- may be inconsistent.
register_trainer('snapshot_hold', {'token', NATURAL, 'lease ms', NATURAL}, function(prefix, args)
  local held = redis.call('HMGET', prefix .. ':run', 'frozen_by', 'frozen_until_ms')
  local now = tick(prefix)
  if held[1] ~= args[2] or tonumber(held[2]) <= now then return 0 end
  redis.call('HSET', prefix .. ':run', 'frozen_until_ms', now + tonumber(args[3]))
  return 1
end)

-- args: trainer fence, token. Resumes the leader. Returns 0 under the same condition as `snapshot_hold`, also to a repeated call.
register_trainer('snapshot_end', {'token', NATURAL}, function(prefix, args)
  local run = prefix .. ':run'
  local held = redis.call('HMGET', run, 'frozen_by', 'frozen_until_ms', 'snapshot_held')
  if held[1] ~= args[2] then return held[3] == args[2] and 1 or 0 end
  redis.call('HDEL', run, 'frozen_by', 'frozen_until_ms')
  notify(prefix, 'control')
  if tonumber(held[2]) <= run_ms(prefix) then return 0 end
  redis.call('HSET', run, 'snapshot_held', args[2])
  return 1
end)

-- args: trainer fence, step. From here to `restore_end` nobody leads, nobody claims, and earlier claims are void; the next
-- trainer starts an interrupted restore again. Steps are deleted; those that the sample log has not read are counted as missed. A
-- trainer restores once: its fence names the restore, and a repeated call, however late, changes nothing. The new incarnation is
-- a time, so that it is also new to a server that was replaced by an empty one.
register_trainer('restore_begin', {'step', INTEGER}, function(prefix, args)
  local run = prefix .. ':run'
  if redis.call('HGET', run, 'restored_by') == args[1] then return 1 end
  if redis.call('HEXISTS', run, 'restoring') == 0 then -- otherwise an interrupted restore has counted them
    for unread = number(prefix, 'retired_step') + 1, number(prefix, 'committed_step') do
      if not is_logged(prefix, unread) then miss_step(prefix, unread) end
    end
  end
  redis.call('HDEL', run, 'leader', 'leader_until_ms', 'leader_fence', 'frozen_by', 'frozen_until_ms', 'published_by')
  redis.call('HDEL', run, 'revived:finished', 'revived:stopping')
  redis.call('HSET', run, 'restoring', args[2], 'restored_by', args[1], 'restored_pieces', 0, 'published_version', -1)
  for stream, group in pairs({[':tickets'] = 'generators', [':headers'] = 'dataprep'}) do
    redis.call('XGROUP', 'DESTROY', prefix .. stream, group)
    redis.call('XTRIM', prefix .. stream, 'MAXLEN', 0)
    redis.call('XGROUP', 'CREATE', prefix .. stream, group, '$', 'MKSTREAM')
  end
  redis.call('DEL', prefix .. ':tickets:rollouts') -- its entries are numbered by the run, and the snapshot may have a lower number
  redis.call('XGROUP', 'CREATE', prefix .. ':tickets:rollouts', 'environments', '$', 'MKSTREAM')
  redis.call('UNLINK', prefix .. ':claims', prefix .. ':claimed', prefix .. ':attempts', prefix .. ':expiries')
  for _, part in ipairs(EVALUATION_PARTS) do
    redis.call('UNLINK', prefix .. ':eval:' .. part)
  end
  redis.call('HSET', run, 'incarnation', math.max(number(prefix, 'incarnation') + 1, math.floor(now_ms() / 1000)))
  notify(prefix, 'control')
  return 1
end)

-- Return nil if this trainer is restoring this step, otherwise the error to return.
local function not_restoring(prefix, step)
  if redis.call('HGET', prefix .. ':run', 'restoring') ~= step then return redis.error_reply('OUTOFORDER no restore to step ' .. step) end
end

-- Commands that a restore writes with: each checks the words after the key.
local function all_fit(words, from, every, kind)
  for i = from, #words, every do
    if not kind.fits(words[i]) then return false end
  end
  return #words >= from
end
local NUMBER = {
  fits = function(text)
    local x = tonumber(text)
    return x and math.abs(x) < math.huge
  end,
}
local WRITES = {
  HSET = function(words) return #words >= 4 and #words % 2 == 0 end,
  SET = function(words) return #words == 3 end,
  RPUSH = function(words) return #words >= 3 end,
  XADD = function(words) return #words >= 5 and #words % 2 == 1 and ENTRY.fits(words[3]) end,
  XDEL = function(words) return all_fit(words, 3, 1, ENTRY) end,
  ZADD = function(words) return #words >= 4 and #words % 2 == 0 and all_fit(words, 3, 2, NUMBER) end,
}

-- Return the commands in args from `at` on; nil if one is incomplete, or is not one that a restore may send.
local function read_commands(prefix, args, at)
  local commands = {}
  while at <= #args do
    local size, command = tonumber(args[at]), {}
    if not size or size < 2 or at + size > #args then return end
    for i = 1, size do command[i] = args[at + i] end
    local write = WRITES[command[1]]
    if not write or not write(command) or string.sub(command[2], 1, #prefix + 1) ~= prefix .. ':' then return end
    commands[#commands + 1], at = command, at + 1 + size
  end
  return commands
end

-- Return the reply to a piece of a restore that is not to be written now, or nil. Between `restore_begin` and `restore_end`
-- everything is changed in pieces, so that a trainer that hung in a restore changes nothing in the run of its successor. Pieces
-- come in order, and a repeated one is not written again.
local function unless_next(prefix, step, number_of)
  local refusal = not_restoring(prefix, step)
  if refusal then return refusal end
  local piece, written = tonumber(number_of), number(prefix, 'restored_pieces')
  if piece <= written then return 1 end
  if piece ~= written + 1 then return redis.error_reply('OUTOFORDER piece ' .. piece .. ' does not follow piece ' .. written) end
end

-- args: trainer fence, step, number of the piece from 1 on, then of each command its number of words, and its words.
register_trainer('restore_write', {'step', INTEGER, 'piece', POSITIVE, EACH, 'word', TEXT}, function(prefix, args)
  local done = unless_next(prefix, args[2], args[3])
  if done then return done end
  local commands = read_commands(prefix, args, 4)
  if not commands then return redis.error_reply('INVALID commands of piece ' .. args[3] .. ' of a restore') end
  for _, command in ipairs(commands) do redis.call(unpack(command)) end
  redis.call('HSET', prefix .. ':run', 'restored_pieces', args[3])
  return 1
end, true)

-- args: trainer fence, step, number of the piece, keys. Deletes what is not restored, also on a full server: it makes room for
-- what is.
register_trainer('restore_delete', {'step', INTEGER, 'piece', POSITIVE, EACH, 'key', TEXT}, function(prefix, args)
  local done = unless_next(prefix, args[2], args[3])
  if done then return done end
  local keys = {}
  for i = 4, #args do
    if string.sub(args[i], 1, #prefix + 1) ~= prefix .. ':' then
      return redis.error_reply('INVALID key of piece ' .. args[3] .. ' of a restore')
    end
    keys[#keys + 1] = args[i]
  end
  call_over(keys, 'UNLINK')
  redis.call('HSET', prefix .. ':run', 'restored_pieces', args[3])
  return 1
end)

-- args: trainer fence, step, then fields and values of the run's hash. Everything else is in place: the run resumes after `step`,
-- which the sample log must know as the beginning of this incarnation. Returns 1, or 0 if this trainer ended its restore before.
register_trainer('restore_end', {'step', INTEGER, EACH, 'field', TEXT, 'value', TEXT}, function(prefix, args)
  local run = prefix .. ':run'
  local restore = redis.call('HMGET', run, 'restoring', 'restored_by')
  if not restore[1] and restore[2] == args[1] then return 0 end
  local refusal = not_restoring(prefix, args[2])
  if refusal then return refusal end
  redis.call('HDEL', run, 'restoring', 'restored_pieces', 'checkpoint_failed', 'restore_failed', 'evaluation_abandoned')
  if #args > 2 then redis.call('HSET', run, unpack(args, 3)) end
  redis.call('HSET', run, 'restored', args[2])
  redis.call('HSET', prefix .. ':samples:state', 'begun:' .. redis.call('HGET', run, 'incarnation'), tonumber(args[2]) + 1)
  if redis.call('HGET', run, 'restore') == args[2] then redis.call('HDEL', run, 'restore') end
  notify(prefix, 'control')
  notify(prefix, 'slots')
  return 1
end, true)
